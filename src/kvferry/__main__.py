"""`python -m kvferry`: the `kvferry` command."""

from kvferry.cli.entry import main

main()
