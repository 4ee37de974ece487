"""The decisions, as pure code: events and the time `now` go in, actions come out.

No torch, no clock, no I/O, no threads, no global randomness. There are four subjects, and none imports
another: `scheduling` (which rows run next), `placement` (which rank holds which experts and serves which
requests), `offloading` (how a model larger than its fast memory is computed) and `fleet` (which processes
serve).
"""
