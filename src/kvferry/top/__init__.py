"""What engines do, live: their `/metrics`, read again and again, and put in few lines.

Pure, one after the other: `exposition` (text to values), `window` (two readings to rates), `quantile`,
`derive` (values to `figures`, what is to be known), `lines` (that to text). Around them: `fetch`, which asks,
`seen`, what is known of an address, and `live`, the terminal.
"""
