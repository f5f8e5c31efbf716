"""An address that answers with the policy, in the protocols of others: for people (`tinyrl serve`), and for agents that
play a run's episodes.
"""
