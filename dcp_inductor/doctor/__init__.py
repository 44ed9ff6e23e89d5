"""What runs here and what doesn't, and why: the command ``dcp-inductor doctor``.

    checkup      what was found, as values
    machine      versions, cards, links, symmetric memory
    software     hooks, caches, hosts
    backends     which backend would serve, and what its workspaces take
    advice       what to do next: a table
    examine      all of it together
    show         the screen
    command      options and exit status

Inside a server ``dcp_inductor.doctor.examine.examine()`` says what holds in that
process: its hooks, and the workspaces it has reserved.
"""

from __future__ import annotations
