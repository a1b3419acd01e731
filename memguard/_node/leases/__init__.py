"""Leases on one host: each process claims its bytes of a GPU, and together they never claim more than it has.

`store` has the claims, in a database of the user's; `locks` says which of them live; `decide` says who may have what
now; `lease` claims, waits and gives back; `neighbours` compares the claims with what NVML lists.

Nothing here is loaded unless a budget says `device: {lease: true}`, or somebody asks who holds what.
"""
