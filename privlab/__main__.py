"""`python -m privlab` works like the command `privlab`."""

from privlab.cli import main

if __name__ == "__main__":
    main()
