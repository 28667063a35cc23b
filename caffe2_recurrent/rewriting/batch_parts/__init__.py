"""The batch of a loop in parts, each of which is a loop of its own, on threads of their own.

    net  ->  regions (`regions.py`): a loop, its gradient operator, and the products that belong to them; and what steps
             read that has a batch (`batch_axes.py`)
         ->  net with an operator for each part of the batch, what takes the batch apart in front of them, and what puts
             it together behind (`parted_net.py`)
         ->  the same, with each of its loops rewritten by the rules
         ->  net in which the parts of a pass are one operator that runs them side by side (`side_by_side.py`), and
             share nothing there (`own_buffers.py`)

Steps of a loop wait for each other, sequences of a batch do not. With several threads in each operator of a step these
meet some dozen times in each step; with a thread for each part they meet once in a pass.
"""
