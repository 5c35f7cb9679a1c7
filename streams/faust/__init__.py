"""The Faust shell of the join: Faust brings the records, positions and transactions are ours."""
