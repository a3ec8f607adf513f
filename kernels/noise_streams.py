"""Noise that a request's seed and a position give beside the target's own, each its own stream.

``coupled_sample`` draws with the seed itself; the others with the seed XOR one of these.
"""

DRAFT = 0x2B7E_1D53_94AC_6F08  # with which a draft model draws; by round and level
ACCEPT = 0x51C9_83F6_0E3A_D72D  # that a drafted token is held against
RESIDUAL = 0x74D0_A89B_62F1_351E  # with which a rejected token's place is filled

# Block verification's coins are keyed by round and draft: so many places of ACCEPT to a round.
PLACES = 64
