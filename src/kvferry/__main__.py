"""`python -m kvferry`: the `kvferry` command."""

from kvferry.tools.cli.entry import main

main()
