# SPDX-License-Identifier: BSD-3-Clause
"""Parallelism: how each strategy shards, gathers, and reduces.

Each module may import those above it:

  pinned            sizes of pinned CPU memory, which offload uses
  mesh              how ranks are arranged: a grid with named dimensions
  groups            process groups and communicators of a run, which take memory on a GPU
  muon              Muon: who gets which matrix whole, what that takes, and what is exchanged
  strategies        what DDP and FSDP gather, free, and reduce around each unit
  expert_parallel   experts spread over ranks: their units, and what is exchanged
  zero              how ZeroRedundancyOptimizer and DeepSpeed's stages partition a model
  deepspeed         what DeepSpeed's stages gather, free, and reduce, and when
  traffic           the collectives of a step
  pipeline          pipeline stages: which blocks each has, and what it computes when
  jax_sharding      FSDP in JAX: what each device stores, sends, and needs temporarily
"""
