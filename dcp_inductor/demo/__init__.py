"""The demo: a small MLA decoder on N real ranks, compiled without and with the pass.

    settings.py   what was asked for, and what it takes to run here
    exchange.py   DCP's exchange, spelled in plain PyTorch
    model.py      the decoder; one rank that holds the whole cache is the same code
    worker.py     what each rank does
    accuracy.py   a run's tokens and logits, held against the one rank
    messages.py   what the ranks send to the parent
    run.py        starts, watches and ends the ranks
    judge.py      what must hold for exit status 0
    show.py       the screen

The decoder never calls dcp_inductor: that the pass finds its exchange is the point.
"""
