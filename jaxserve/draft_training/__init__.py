"""Training a draft head: prompts, the target's answers to them, the head's parameters, and what they are stored as.

prompts.py   what the target asks itself     corpus.py   what it answered, token ids and hidden states, in shards
options.py   how it is trained              trainer.py  the loop over them
report.py    its curve
"""
