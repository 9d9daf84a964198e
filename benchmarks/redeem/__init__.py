"""How long it takes to redeem a ticket."""
