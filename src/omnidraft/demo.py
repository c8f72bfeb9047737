"""Prompts of our own writing for the demo: ten of math, code and summary; two streams to learn from."""

_NOTICE = (
    "The town library will close for repairs from the third of March until the end of the month. Books that "
    "fall due in this time may be returned to the school in Mill Lane, which will also lend out the children's "
    "collection on Saturday mornings. Reading groups meet in the town hall instead, at their usual hours."
)
_REPORT = (
    "The first prototype of the pump ran for nine days before a seal failed. We replaced the rubber with a "
    "softer compound and lowered the pressure by a tenth; the second prototype has now run for six weeks and "
    "shows no wear. The flow is slightly lower than planned, but still above what the greenhouse needs."
)

PROMPTS: tuple[str, ...] = (
    "A baker sells 36 rolls in the morning and half as many in the afternoon. How many rolls does he sell in all?",
    "A train covers 180 km in 2 hours and 15 minutes. What is its average speed? Work it out step by step.",
    "Anna reads 14 pages a day. Her book has 238 pages and she has read 70. How many more days does she need?",
    "Three pens and a notebook cost 11 euros; a notebook costs 5. What does a pen cost?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Write a Python class for a stack with push, pop and peek, and raise an error when it is empty.",
    "Write a Python function that counts how often each word occurs in a text file.",
    f"Summarize this notice in one sentence.\n\n{_NOTICE}",
    f"Summarize this report in one sentence.\n\n{_REPORT}",
)

_SUM = "{} Answer in one short sentence."
_CODE = "Write a Python function `{}` that {}. Give only the code, without comments."

# The last four of each judge what was learned from the others.
STREAMS: dict[str, tuple[str, ...]] = {
    "word problems": tuple(
        map(
            _SUM.format,
            (
                "Tom has 12 apples and buys 9 more. How many apples does he have?",
                "A box holds 24 eggs. How many eggs do 5 boxes hold?",
                "Mia had 50 euros and spent 18 on a book. How much money does she have left?",
                "A bus carries 35 people and 8 get off. How many people are still on the bus?",
                "Ben plants 6 rows of 7 trees. How many trees does he plant?",
                "Sara cuts a rope of 40 meters into 8 equal pieces. How long is each piece?",
                "A shop sells 15 lamps on Monday and 27 on Tuesday. How many lamps does it sell?",
                "Leo saves 4 euros a week. How much money does he save in 13 weeks?",
                "A farmer has 61 sheep and sells 25. How many sheep does he have left?",
                "Three friends share 45 cherries equally. How many cherries does each friend get?",
                "A train has 9 cars with 60 seats each. How many seats does the train have?",
                "Nina reads 30 pages on Saturday and 44 on Sunday. How many pages does she read?",
                "Paul has 17 stamps and gets 16 more. How many stamps does he have?",
                "A crate holds 18 bottles. How many bottles do 4 crates hold?",
                "Eva had 72 euros and spent 29 on shoes. How much money does she have left?",
                "A baker bakes 56 rolls and puts 7 in each bag. How many bags does he fill?",
            ),
        )
    ),
    "small functions": tuple(
        _CODE.format(name, task)
        for name, task in (
            ("double", "returns twice a number"),
            ("is_even", "says whether a number is even"),
            ("largest", "returns the largest of a list of numbers"),
            ("last_word", "returns the last word of a text"),
            ("square", "returns the square of a number"),
            ("is_negative", "says whether a number is negative"),
            ("smallest", "returns the smallest of a list of numbers"),
            ("first_word", "returns the first word of a text"),
            ("average", "returns the average of a list of numbers"),
            ("is_upper", "says whether a text is in upper case"),
            ("count_vowels", "counts the vowels of a text"),
            ("evens", "returns the even numbers of a list"),
            ("triple", "returns three times a number"),
            ("is_odd", "says whether a number is odd"),
            ("total", "returns the sum of a list of numbers"),
            ("longest_word", "returns the longest word of a text"),
        )
    ),
}
HELD_OUT = 4
