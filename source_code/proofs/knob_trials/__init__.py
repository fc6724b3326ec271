# SPDX-License-Identifier: BSD-3-Clause
"""Trials of FSDP's knobs on real ranks: what each changes, predicted by arithmetic, and measured (``proofs.knobs``).

bench       the network, its plan, the meters, and the list of trials
sharding    arguments of fully_shard
unsharding  when parameters are gathered and freed
reducing    how gradients are reduced
precision   number formats and offload
fsdp1       FSDP1's constructor
"""
