"""`python -m headrace`: the command line."""

from headrace.cli.main import main

if __name__ == "__main__":
    main()
