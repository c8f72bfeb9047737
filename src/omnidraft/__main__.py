"""`python -m omnidraft`."""

from omnidraft.cli import main

if __name__ == "__main__":
    main()
