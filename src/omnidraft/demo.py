"""Ten prompts of our own writing for the demo: math, code, summary."""

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
