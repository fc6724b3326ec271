# SPDX-License-Identifier: BSD-3-Clause
"""Command lines that must be refused, and the sentences they are refused with: python tests/bad_input.py

Each stands with words that its sentence must contain: options, values and names, so that a test of one does not depend
on how the sentence is put. How it is put is in messages.txt, for all of them in one place, where a rewording is
reviewed; the command above writes that file anew. Tests: test_bad_input.py.
"""

import contextlib
import functools
import importlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import conftest  # noqa: F401  it puts source_code/ on the path and hides GPUs, also when this file is run
from commands import options_class, script
from labkit import UserError
from labkit.running import options

MESSAGES = Path(__file__).with_name("messages.txt")

# {command: {options: words of the sentence}}. FOLDER: the one that ``files`` fills.

BEFORE_ANYTHING_STARTS = {
    "exam.py": {
        "": "--seed --judge --recheck",
        "--judge FOLDER --recheck FOLDER/exam-7.json": "--judge --recheck",
        "--judge FOLDER --folder elsewhere": "--folder --judge --recheck",
        "--seed 7 --no-run": "--no-run",
        "--seed -1": "--seed 0 -1",
        "--seed 7 --folder FOLDER": "--folder exists",
        "--seed 7 --folder FOLDER/text.txt/exam": "--folder text.txt",
        "--judge FOLDER/nowhere": "answers.json --seed",
        "--judge FOLDER/text.txt": "answers.json --seed",
        "--recheck FOLDER/nowhere.json": "nowhere.json --judge",
        "--recheck FOLDER/torn.py": "torn.py JSON 1",
        "--recheck FOLDER/list.json": "list.json seed answers",
        "--recheck FOLDER/exam-7.json": "exam-7.json 7 edition",
        "--recheck FOLDER/exam-7.json --seed 8": "exam-7.json --seed 7 8",
    },
    "plan.py": {
        "--preset gpt9": "--preset 'gpt9'",
        "--module no.py:build": "no.py",
        "--module FOLDER/own.py:other": "own.py other",
        "--module FOLDER/own.py:nothing": "own.py nothing",
        "--module FOLDER/own.py:a_number": "own.py:a_number (module, inputs, loss)",
        "--module FOLDER/own.py:too_little": "own.py:too_little (module, inputs, loss)",
        "--module FOLDER/own.py:odd_heads": "own.py:odd_heads 30 4 heads",
        "--module FOLDER/torn.py:build": "torn.py SyntaxError",
        "--module FOLDER/text.txt:build": "--module FILE.py:function text.txt:build",
        "--module FOLDER/own.py:build --batch-size 4": "--batch-size",
        "--module FOLDER/own.py:build --lora 4": "--lora",
        "--module FOLDER/own.py:build --strategy deepspeed-3": "--strategy deepspeed-3 fsdp2",
        "--module FOLDER/own.py:build --precision fp64": "--precision fp64",
        "--module FOLDER/own.py:build --sweep": "--sweep --module",
        "--module FOLDER/own.py:build --explain": "--explain --module",
        "--module FOLDER/own.py:build --find ranks": "--find --module",
        "--module FOLDER/own.py:build --plot plan.png": "--plot --module",
        "--module FOLDER/own.py:build --tokens 1e9": "--tokens --module",
        "--module FOLDER/own.py:build --preset tiny": "--preset --module",
        "--ranks 0": "--ranks 1 0",
        "--batch-size -1": "--batch-size 1 -1",
        "--seq-len 0": "--seq-len 1 0",
        "--gpu-memory -80": "--gpu-memory 0 -80",
        "--gpu-memory nan": "--gpu-memory nan",
        "--gpu-memory inf": "--gpu-memory inf",
        "--flops inf": "--flops inf",
        "--link inf": "--link nvlink 1e-06 1e+06 'inf'",
        "--efficiency 40": "--efficiency 1 40",
        "--ranks eight": "--ranks int 'eight'",
        "--strategy zero2": "--strategy 'zero2'",
        "--strategy deepspeed-3 --precision fp64": "DeepSpeed fp32 bf16 --precision",
        "--strategy deepspeed-2 --reshard-after-forward false": "--reshard-after-forward --strategy fsdp1 fsdp2",
        "--strategy deepspeed-1 --weights bf16 --precision bf16": "DeepSpeed --weights --strategy",
        "--strategy deepspeed-1 --loss-chunks 2": "DeepSpeed --loss-chunks --strategy",
        "--strategy deepspeed-1 --lora 4": "DeepSpeed --lora --strategy",
        "--strategy deepspeed-3 --simulate": "--strategy deepspeed-3 fsdp2",
        "--mesh 2x8": "--mesh 2x8 16 8",
        "--mesh two": "--mesh 2x4 NAME=SIZE 'two'",
        "--mesh=-2x-4": "--mesh 2x4 NAME=SIZE '-2x-4'",
        "--strategy ddp --mesh 2x4": "--mesh --strategy fsdp1 fsdp2 ddp",
        "--strategy zero1 --reshard-after-forward false": "--reshard-after-forward --strategy fsdp1 fsdp2",
        "--reshard-after-forward maybe": "--reshard-after-forward true false 2 'maybe'",
        "--reshard-after-forward 3": "--reshard-after-forward 3 8",
        "--strategy fsdp1 --reshard-after-forward 2": "--reshard-after-forward FSDP2 FSDP1 true false",
        "--strategy single --ranks 8": "--strategy single --ranks",
        "--link copper": "--link nvlink pcie 1e-06 1e+06 'copper'",
        "--network -3": "--network infiniband ethernet GB/s '-3'",
        "--preset mnist": "--preset 'mnist'",
        "--strategy zero1 --simulate": "--strategy zero1 fsdp2",
        "--weights bf16": "--weights bf16 --precision",
        "--recompute-every 2": "--recompute-every --recompute full selective alternate",
        "--preset 1b --wrap blocks+embeddings": "--wrap blocks+embeddings embedding head",
        "--wrap blocks+embeddings --strategy ddp": "--wrap --strategy fsdp1 fsdp2 ddp",
        "--strategy fsdp1 --cpu-offload": "FSDP1 --cpu-offload fsdp2",
        "--mesh shard=4,tensor=2 --loss-chunks 2": "--mesh shard=4,tensor=2 --loss-chunks",
        "--mesh shard=4,tensor=2 --simulate": "tensor --simulate one_rank.py",
        "--mesh shard=4,context=2 --simulate": "sequences --simulate one_rank.py",
        "--mesh shard=4,context=2": "flash --precision bf16 --gpu",
        "--mesh pipeline=4,context=2 --accumulate 8": "pipeline --mesh pipeline=N",
        "--config FOLDER/llama.json --mesh shard=4,context=2": "--mesh shard=4,context=2 context",
        "--mesh pipeline=8 --accumulate 8 --prefetch 1": "pipeline --prefetch",
        "--mesh pipeline=8 --accumulate 8 --simulate": "pipeline=8 --simulate",
        "--mesh pipeline=8 --accumulate 8 --plot plan.png": "--plot pipeline",
        "--frozen nf4": "--frozen --lora",
        "--experts 8 --strategy zero1": "--experts 8 gpt_fsdp.py --strategy fsdp2 ddp single",
        "--experts 8 --ranks 8 --mesh pipeline=8 --accumulate 8": "pipeline --experts",
        "--experts 8 --simulate": "--experts 8 --simulate",
        "--experts 8 --imbalance 2": "--imbalance --mesh shard=8,expert=N",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2 --imbalance 2.5": "--imbalance 2.5 2",
        "--config FOLDER/llama.json --experts 8": "--experts",
        "--frozen nf4 --lora 4": "4 bits single ddp --precision bf16",
        "--frozen nf4 --lora 4 --simulate": "nf4 --simulate",
        "--optimizer adamw-8bit --simulate": "adamw-8bit --simulate",
        "--optimizer lion --simulate": "lion --simulate",
        "--precision fp16 --simulate": "--precision fp16 bf16",
        "--recompute full --offload-activations --simulate": "--offload-activations --simulate",
        "--recompute full --offload-activations --sweep": "--offload-activations --sweep",
        "--gpu t4 --precision fp64": "t4 fp64 --flops --precision",
        "--optimizer muon --strategy zero1": "Muon zero1 fsdp2 ddp single",
        "--optimizer muon-dtensor --preset tiny --ranks 128": "64x128 128 --optimizer muon",
        "--cpu-offload --simulate": "--cpu-offload adamw-8bit nf4 --simulate",
        "--sweep --cpu-offload": "--sweep --cpu-offload",
        "--strategy deepspeed-2 --optimizer adamw-8bit": "DeepSpeed 8-bit",
        "--sweep --simulate": "--sweep --simulate --explain",
        "--sweep --explain": "--sweep --explain",
        "--gpu h1000": "--gpu 'h1000'",
        "--gpu l4 --precision fp64": "l4 fp64 --flops --precision",
        "--price 2": "--price --tokens",
        "--tokens 0": "--tokens 1 0",
        "--tokens 1e9 --sweep": "--tokens --sweep",
        "--find seq-len --explain": "--find --sweep --simulate --explain --plot --tokens",
        "--find seq-len --sweep": "--find --sweep",
        "--find seq-len --simulate": "--find --simulate",
        "--find seq-len --plot plan.png": "--find --plot",
        "--find seq-len --tokens 1e9": "--find --tokens",
        "--find ranks --mesh 2x4": "--find ranks --mesh --strategy single",
        "--find ranks --reshard-after-forward 2": "--find ranks",
        "--find ranks --strategy single": "--find ranks --strategy single",
        "--find ranks --cpu-offload": "--find ranks --cpu-offload",
        "--find gpus": "--find 'gpus'",
        "--plot FOLDER/plan.doc": "plan.doc .png .svg .pdf",
        "--plot FOLDER/no/plan.png": "no/plan.png directory",
        "--plot plan.png --sweep": "--plot --sweep --json",
        "--plot plan.png --json": "--plot --json",
        "--config FOLDER/no.json": "--config no.json config.json",
        "--config FOLDER": "--config FOLDER config.json",
        "--model FOLDER": "--model FOLDER config.json",
        "--config FOLDER/text.txt": "--config text.txt JSON",
        "--config FOLDER/list.json": "--config list.json config.json",
        "--config FOLDER/llama.json --preset tiny": "--preset --config",  # the default, too
        "--config FOLDER/llama.json --model FOLDER": "--config --model",
        "--config FOLDER/llama.json --tied": "--tied",
        "--config FOLDER/llama.json --simulate --device cpu --wrap blocks": "hf_fsdp.py --wrap",
        "--config FOLDER/llama.json --simulate --device cpu --recompute alternate": "hf_fsdp.py --recompute alternate",
        "--config FOLDER/llama.json --simulate --device cpu --strategy fsdp1": "hf_fsdp.py --strategy fsdp1",
        "--config FOLDER/llama.json --mesh pipeline=8 --accumulate 8": "--mesh pipeline=8 --config",
        "--config FOLDER/gpt2.json": "--seq-len 128 64",
        "--config FOLDER/mixtral.json --mesh shard=8,expert=8": "expert shard hf_fsdp.py --record",
        "--config FOLDER/mamba.json --mesh shard=8,expert=8": "expert shard hf_fsdp.py --record",
        "--config FOLDER/llama.json --lora 4 --sweep": "peft --sweep",
        "--config FOLDER/mamba.json --sweep": "'mamba' --sweep",
        "--config FOLDER/mamba.json --find ranks": "'mamba' --find",
        "--config FOLDER/mamba.json --explain": "'mamba' --explain",
        "--config FOLDER/mamba.json --plot plan.png": "'mamba' --plot",
        "--config FOLDER/mamba.json --tokens 1e9": "'mamba' --tokens",
        "--config FOLDER/t5.json": "t5.json t5 --module",
        "--config FOLDER/stablelm.json --seq-len 65": "--seq-len 65 64",
        "--config FOLDER/deepspeed.json": "DeepSpeed --strategy deepspeed-3 config.json",
        "--config FOLDER/accelerate.yaml": "accelerate --strategy fsdp2 config.json",
        "--gpu v100 --precision bf16": "v100 no bf16 --precision fp16",
        "--config FOLDER/halved.json": "halved.json num_hidden_layers 1",
        "--config FOLDER/typed.json": "typed.json hidden_size '64' 1",
        "--config FOLDER/odd.json": "odd.json 15 odd",
        "--ranks 4 --mesh pipeline=4 --accumulate 2": "--accumulate 2 4",
        "--ranks 4 --mesh pipeline=4 --accumulate 4 --sweep": "pipeline",
        "--ranks 4 --schedule gpipe": "--schedule pipeline",
        "--nothing": "--nothing",
        "--dry-run": "--dry-run",
    },
    "mnist_fsdp.py": {
        "--strategy zero": "--strategy 'zero'",
        "--strategy ddp --cpu-offload": "--cpu-offload --strategy fsdp1 fsdp2 ddp",
        "--strategy single --wrap size": "--wrap size --strategy fsdp1 fsdp2",
        "--strategy ddp --reshard-after-forward false": "--reshard-after-forward false --strategy fsdp1 fsdp2",
        "--strategy single --ranks 2": "--strategy single --ranks",
        "--ranks 0": "--ranks 1 0",
        "--epochs -1": "--epochs 1 -1",
        "--ranks two": "--ranks int 'two'",
        "--batch-size 8 --global-batch-size 16": "--batch-size --global-batch-size",
        "--resume": "--resume --checkpoint",
        "--lr nan": "--lr nan",
        "--lr inf": "--lr inf",
        "--gamma -3": "--gamma 0 -3",
        "--max-steps 0": "--max-steps 1 0",
        "--no-such-option": "--no-such-option",
    },
    "gpt_fsdp.py": {
        "--ranks 4 --mesh shard=4,expert=2": "--mesh shard=4,expert=2 expert",
        "--experts 1": "--experts 2 1",
        "--top-k 4": "--top-k --experts",
        "--experts 4 --top-k 0": "--top-k 1 0",
        "--experts 2 --top-k 3": "3 2 --top-k",
        "--experts 4 --capacity-factor 0": "--capacity-factor 0",
        "--experts 4 --balance luck": "--balance 'luck'",
        "--experts 8 --strategy fsdp1": "--experts 8 FSDP1 --strategy fsdp2 ddp single",
        "--experts 8 --precision fp16": "--experts 8 fp16 --precision bf16 fp32",
        "--experts 8 --lora 4": "--experts 8 --lora",
        "--experts 8 --compile": "--experts 8 --compile",
        "--experts 8 --mesh tensor=2": "--experts 8 tensor --mesh",
        "--experts 8 --optimizer muon": "--experts 8 Muon --optimizer adamw",
        "--experts 8 --recompute selective": "--experts 8 --recompute full none",
        "--experts 8 --strategy ddp --precision bf16": "autocast --experts --strategy fsdp2 --weights bf16 --precision fp32",
        "--experts 8 --mesh context=2 --capacity-factor 1.5": "--mesh context=2 --capacity-factor",
        "--experts 8 --mesh context=2 --balance loss": "--mesh context=2 --balance loss",
        "--experts 8 --ranks 4 --mesh replicate=2,shard=2,expert=2": "--mesh replicate=2,shard=2,expert=2 replicate",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2 --prefetch 1": "--mesh shard=4,expert=2 --prefetch",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2 --cpu-offload": "--mesh shard=4,expert=2 --cpu-offload",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2 --reshard-after-forward 2": "--mesh shard=4,expert=2 --reshard-after-forward true false",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2 --optimizer adamw-bf16": "--mesh shard=4,expert=2 --optimizer adamw-bf16 adamw",
        "--strategy zero": "--strategy 'zero'",
        "--preset huge": "--preset 'huge'",
        "--strategy ddp --mesh 1x2": "--mesh --strategy fsdp1 fsdp2 ddp",
        "--strategy single --cpu-offload": "--cpu-offload --strategy fsdp1 fsdp2",
        "--strategy ddp --reshard-after-forward false": "--reshard-after-forward --strategy fsdp1 fsdp2",
        "--strategy fsdp1 --prefetch 2": "--prefetch --strategy fsdp2",
        "--strategy fsdp1 --reshard-after-forward 2": "--reshard-after-forward FSDP2",
        "--strategy fsdp1 --mesh 1x2 --reshard-after-forward false": "FSDP1 --mesh --reshard-after-forward",
        "--reshard-after-forward maybe": "--reshard-after-forward true false 2 'maybe'",
        "--reshard-after-forward 1": "--reshard-after-forward 2 '1'",
        "--strategy fsdp1 --clip 1 --precision fp64": "FSDP1 --clip fp32",
        "--mesh 2by4": "--mesh 2x4 NAME=SIZE '2by4'",
        "--mesh 0x4": "--mesh '0x4'",
        "--strategy single --ranks 2": "--strategy single --ranks",
        "--resume": "--resume --checkpoint",
        "--checkpoint-every 5": "--checkpoint-every --checkpoint",
        "--accumulate 0": "--accumulate 1 0",
        "--lora 0": "--lora 1 0",
        "--min-lr 1e-4": "--min-lr --lr-schedule cosine wsd",
        "--decay-steps 3": "--decay-steps --lr-schedule wsd",
        "--decay-steps 3 --lr-schedule cosine": "--decay-steps --lr-schedule wsd",
        "--min-lr 1 --lr-schedule cosine": "--min-lr 1 --lr 0.001",
        "--warmup-steps 20 --lr-schedule cosine": "--max-steps 20 --warmup-steps --decay-steps",
        "--warmup-steps 19 --lr-schedule wsd": "--max-steps 20 --warmup-steps --decay-steps",
        "--decay-steps 21 --lr-schedule wsd": "--max-steps 20 --warmup-steps --decay-steps",
        "--optimizer sgd --weight-decay 0.1": "--weight-decay AdamW",
        "--optimizer momentum --no-decay-1d": "--no-decay-1d AdamW",
        "--precision fp16 --mesh shard=2,tensor=2": "--precision fp16 tensor bf16 fp32",
        "--precision fp16 --cpu-offload": "--precision fp16 --cpu-offload bf16 fp32",
        "--precision fp16 --strategy fsdp1 --optimizer adamw-fused": "FSDP1 --optimizer adamw-fused adamw",
        "--offload-activations": "--offload-activations --recompute full",
        "--recompute full --offload-activations --compile": "--offload-activations --compile",
        "--optimizer adamw-bf16 --precision fp64": "--optimizer adamw-bf16 --precision fp64 fp32 adamw",
        "--optimizer muon --strategy fsdp1": "--optimizer muon FSDP1 --strategy fsdp2 ddp single",
        "--optimizer muon --mesh tensor=2": "--optimizer muon --mesh tensor=2 adamw",
        "--optimizer muon --cpu-offload": "--optimizer muon --cpu-offload adamw",
        "--optimizer muon-gather --lora 4": "--optimizer muon-gather --lora adamw",
        "--optimizer muon-gather --strategy ddp": "--optimizer muon-gather FSDP2 muon",
        "--strategy fsdp1 --no-decay-1d": "--no-decay-1d FSDP1 --strategy fsdp2 ddp",
        "--warmup-steps -1": "--warmup-steps 0 -1",
        "--weight-decay -0.1": "--weight-decay 0 -0.1",
        "--strategy fsdp1 --mesh 2x1": "FSDP1 --mesh 2x1 ddp",
        "--strategy fsdp1 --cpu-offload --accumulate 2": "FSDP1 --cpu-offload --sync last",
        "--prefetch -1": "--prefetch 0 -1",
        "--recompute-every 2": "--recompute-every --recompute full selective alternate",
        "--recompute full --recompute-every 0": "--recompute-every 1 0",
        "--weights bf16": "--weights bf16 --precision",
        "--loss-chunks 0": "--loss-chunks 1 0",
        "--wrap blocks+embeddings --tied": "--wrap blocks+embeddings embedding head",
        "--wrap blocks+embeddings --strategy ddp": "--wrap blocks+embeddings --strategy fsdp1 fsdp2 ddp",
        "--clip 0": "--clip 0",
        "--lr nan": "--lr nan",
        "--mesh 2x4": "--mesh 2x4 8 2",
        "--ranks 3 --reshard-after-forward 2": "--reshard-after-forward 2 3",
        "--ranks 4 --mesh 2x2 --reshard-after-forward 4": "--reshard-after-forward 4 2",
        "--ranks 8 --mesh tensor=4": "--mesh tensor=4 4 8",
        "--ranks 4 --mesh tensor=4": "2 heads 4 --mesh",
        "--mesh tensor=2 --seq-len 33": "33 2 --mesh",
        "--mesh tensor=2 --strategy fsdp1": "--mesh tensor=2 --strategy fsdp1",
        "--mesh tensor=2 --lora 4": "--mesh tensor=2 --lora",
        "--mesh tensor=2 --compile": "--mesh tensor=2 --compile",
        "--mesh tensor=2 --wrap blocks+embeddings": "--mesh tensor=2 --wrap",
        "--mesh tensor=2 --loss-chunks 2": "--mesh tensor=2 --loss-chunks",
        "--mesh tensor=2 --weights bf16 --precision bf16": "--mesh tensor=2 --weights",
        "--context-attention gather": "--context-attention --mesh context=N",
        "--strategy fsdp1 --context-attention gather": "--context-attention --strategy fsdp2 fsdp1",
        "--mesh context=2 --strategy fsdp1": "--mesh context=2 --strategy fsdp1",
        "--mesh context=2 --compile": "--mesh context=2 --compile",
        "--mesh context=2 --recompute selective": "--recompute selective full --context-attention ring ulysses",
        "--mesh context=2 --context-attention gather --recompute alternate": "--recompute alternate gather full ulysses",
        "--mesh context=2 --seq-len 34": "--mesh context=2 ring 4 --seq-len 34",
        "--mesh context=2 --seq-len 33 --context-attention ulysses": "--mesh context=2 ulysses 2 --seq-len 33",
        "--ranks 4 --mesh context=4 --context-attention ulysses": "ulysses 2 heads 4 --mesh --context-attention ring",
        "--ranks 4 --mesh context=2,tensor=2 --seq-len 12 --context-attention ulysses": "ulysses 2 heads 4",
        "--mesh pipeline=2": "--mesh pipeline=2 gpt_pipeline.py",
        "--mesh tensor=1,tensor=2": "--mesh tensor=1,tensor=2 once",
        "--mesh tensors=2": "--mesh tensors=2 pipeline, replicate, shard, context, tensor",
    },
    "gpt_pipeline.py": {
        "--schedule zero-bubble": "--schedule 'zero-bubble'",
        "--strategy ddp": "--strategy ddp",
        "--mesh 4": "--mesh 2x4 NAME=SIZE '4'",
        "--accumulate 0": "--accumulate 1 0",
        "--ranks 4 --accumulate 3": "--accumulate 3 4 --schedule 1f1b gpipe",
        "--ranks 4 --mesh pipeline=2": "--mesh pipeline=2 2 4",
        "--ranks 4 --mesh pipeline=2,shard=2": "pipeline --mesh pipeline=N",
        "--ranks 4 --mesh 2x2": "pipeline --mesh pipeline=N",
        "--ranks 4 --mesh stages=4": "--mesh stages=4 pipeline, replicate, shard, context, tensor",
        "--ranks 4 --preset 1b": "embedding head preset",
        "--ranks 5 --accumulate 8": "5 4 ranks",
    },
    "gpt_zero.py": {
        "--mesh 2x2": "--mesh",
        "--stage 0 --engine deepspeed --cpu-offload": "--cpu-offload --stage 0",
        "--stage 1 --cpu-offload": "--cpu-offload --stage --engine deepspeed 1",
        "--engine deepspeed --precision fp64": "DeepSpeed --precision fp64 --engine",
        "--engine deepspeed --checkpoint FOLDER/saved": "DeepSpeed --checkpoint --engine",
        "--stage 1 --checkpoint FOLDER/saved": "--checkpoint --stage",
    },
    "hf_fsdp.py": {
        "--ranks 2": "--model --config",
        "--model FOLDER --config FOLDER/llama.json": "--model --config",
        "--config FOLDER/llama.json --tokens model": "--tokens --model",
        "--config FOLDER/llama.json --strategy fsdp1": "--strategy 'fsdp1'",
        "--config FOLDER/llama.json --recompute alternate": "--recompute 'alternate'",
        "--config FOLDER/llama.json --max-steps 5 --epochs 2": "--max-steps --epochs",
        "--config FOLDER/llama.json --validation 1.5": "--validation 0.05 1.5",
        "--config FOLDER/llama.json --validate-every 5": "--validate-every --validation",
        "--config FOLDER/llama.json --lora-alpha 8": "--lora-alpha --lora",
        "--config FOLDER/llama.json --save-dtype bf16": "--save-dtype --save",
        "--config FOLDER/llama.json --save-every 5": "--save-every --save",
        "--config FOLDER/llama.json --save FOLDER/tuned --merge": "--merge --lora --adapters",
        "--config FOLDER/llama.json --adapters FOLDER": "--adapters --model",
        "--model FOLDER --adapters FOLDER --lora 8": "--adapters --lora",
        "--model FOLDER --adapters FOLDER --mesh tensor=2": "--mesh tensor=2 --adapters",
        "--config FOLDER/llama.json --mesh context=2": "--mesh context=2 gpt_fsdp.py",
        "--config FOLDER/llama.json --ranks 4 --mesh shard=4,expert=3": "expert --mesh shard=4,expert=3",
    },
    "gpt_jax.py": {
        "--strategy ddp": "--strategy 'ddp'",
        "--precision fp16": "--precision 'fp16'",
        "--ranks 4": "--ranks",
        "--devices 0": "--devices 1 0",
        "--mesh 4x2": "--mesh fsdp=SIZE,tensor=SIZE '4x2'",
        "--mesh fsdp=4,tensor=2": "--mesh fsdp=4,tensor=2 --strategy fsdp-weights",
        "--strategy replicated --mesh fsdp=8": "--mesh --strategy fsdp-explicit replicated",
        "--strategy replicated --min-size 0": "--min-size --strategy fsdp-explicit replicated",
        "--strategy fsdp-activations --reshard-after-forward false": "--reshard-after-forward fsdp-explicit "
        "fsdp-activations",
        "--weights w.safetensors --checkpoint c --resume": "--weights w.safetensors --resume",
        "--resume": "--resume --checkpoint",
        "--lr nan": "--lr nan",
    },
    "ladder.py": {
        "--data cifar": "--data 'cifar'",
        "--epochs 0": "--epochs 1 0",
        "--ranks x": "--ranks int 'x'",
    },
}
WHEN_STARTED = {
    "mnist_fsdp.py": {
        "--ranks 2 --global-batch-size 97": "--global-batch-size 97 2",
        "--strategy single --batch-size 5000": "5000 mnist-5k 4000",
        "--strategy fsdp1 --cpu-offload --ranks 2": "FSDP1 --cpu-offload GPU",
        "--strategy single --record FOLDER/text.txt/run.json": "record FOLDER/text.txt/run.json",
        "--strategy single --record FOLDER": "record FOLDER",
        "--strategy single --checkpoint FOLDER/text.txt/ckpt": "checkpoint FOLDER/text.txt/ckpt",
        "--strategy single --max-steps 11 --profile FOLDER/text.txt/trace": "trace FOLDER/text.txt/trace",
        "--strategy single --profile FOLDER/trace": "--profile 11 2",
        "--ranks 100000": "--ranks 100000",
        "--device cuda": "--device cuda GPU",
        "--backend nccl": "--backend nccl GPU",
    },
    "gpt_fsdp.py": {
        "--mesh tensor=4 --ranks 4": "2 heads 4 --mesh",
        "--strategy fsdp1 --cpu-offload": "FSDP1 --cpu-offload GPU",
        "--experts 5 --ranks 2 --mesh shard=2,expert=2": "5 2 --mesh expert=2",
        "--strategy single --seq-len 100000": "--seq-len",
        "--strategy single --record FOLDER": "record FOLDER",
        "--preset llama3-405b --lora 8": "--preset llama3-405b --strategy fsdp2 GiB",
    },
    "gpt_pipeline.py": {"--accumulate 1 --device cpu": "--accumulate 1 2"},
    "one_rank.py": {
        "--strategy ddp": "gpt_fsdp.py --strategy single",
        "--ranks 1": "--ranks 2",
        "--checkpoint x": "--checkpoint",
        "--experts 8 --ranks 4 --mesh shard=4,expert=2": "--mesh shard=4,expert=2 plan.py",
        "--ranks 4 --mesh 3x2": "--mesh 3x2",
        "--preset llama3-405b --ranks 2 --device cpu": "llama3-405b GiB",
    },
}
SHORT = {"mnist_fsdp.py": "--data mnist-5k --max-steps 2"}  # what a command is given besides, should it not refuse

OWN = """
import torch
from torch import nn

def build():
    layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
    layers.forward = lambda x: layers[2](layers[1](layers[0](x)))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
    return Net(), (torch.zeros(7, 96),), lambda module, x: module(x).mean()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.mix(x)
        return x + sum(expert(x) for expert in self.experts)

def experts():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.last = nn.Linear(8, 8)
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.last(x)
    return Net(), (torch.zeros(7, 8),), lambda module, x: module(x).mean()

def a_number():
    return 3

def too_little():
    return nn.Linear(2, 2), ()

def odd_heads():
    from labkit.training.models import GPT
    from planner.models.shapes import GPTShape
    return GPT(GPTShape(num_hidden_layers=1, hidden_size=30, num_attention_heads=4, num_key_value_heads=4, intermediate_size=8)), (), None

def broken():
    return nn.Linear(2, 2), (torch.zeros(1, 3),), lambda module, x: module(x).sum()

nothing = None
"""


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "vocab_size": 100}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS = {
    "llama": {},
    "gpt2": GPT2,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_key_value_heads": 2},
    "mamba": {"model_type": "mamba"},
    "t5": {"model_type": "t5"},
    "stablelm": {"model_type": "stablelm", "max_position_embeddings": 64},
    "halved": {"num_hidden_layers": None},
    "typed": {"hidden_size": "64"},
    "odd": {"hidden_size": 60},
}


def files(folder: Path) -> Path:
    """Fill a folder with models of one's own and configurations, most of them wrong. Returns the folder."""
    (folder / "own.py").write_text(OWN)
    (folder / "torn.py").write_text("def build(:")
    (folder / "text.txt").write_text("build")
    (folder / "list.json").write_text("[1, 2]")
    (folder / "exam-7.json").write_text('{"seed": 7, "tasks": "another edition", "answers": {}}')
    (folder / "deepspeed.json").write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    (folder / "accelerate.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    for name, changes in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(LLAMA | changes))
    return folder


@functools.cache
def refusal(command: str, words: str, folder: Path) -> str:
    """Return the sentence with which a command refuses its words. AssertionError where it does not, or not as it should:
    with exit code 2, one sentence that begins with the command's name, and nothing written."""
    there = contents(folder)
    if words in WHEN_STARTED.get(command, ()):
        run = script(command, *SHORT.get(command, "").split(), *in_place(words, folder))
        code, out, err = run.returncode, "", run.stderr  # it may have said how it starts
    else:
        code, out, err = in_this_process(command, in_place(words, folder))
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith(f"{command}: ") and err.count("\n") == 1, err
    assert contents(folder) == there
    return err.removeprefix(f"{command}: ").rstrip()


def contents(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def in_place(words: str, folder: Path) -> list[str]:
    return words.replace("FOLDER", str(folder)).split()


def in_this_process(command: str, words: list[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command up to where a lab would start its ranks."""
    module, out, err = importlib.import_module(command.removesuffix(".py")), io.StringIO(), io.StringIO()
    replaced = mock.patch.multiple(sys, argv=[command, *words], path=[*sys.path])
    with replaced, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command in ("exam.py", "plan.py"):
                module.main()
            else:
                config = options.parse(options_class(command), "")
                config.arranged(config.ranks or 2)
        except SystemExit as exit_:
            return exit_.code, out.getvalue(), err.getvalue()
        except UserError as error:  # which a lab's rank makes a sentence of
            return 2, out.getvalue(), f"{command}: {error}\n"
    return 0, out.getvalue(), err.getvalue()


def all_rows() -> list[tuple[str, str, str]]:
    """(command, options, words of the sentence) of each."""
    tables = (BEFORE_ANYTHING_STARTS, WHEN_STARTED)
    return [(command, *row) for table in tables for command, rows in table.items() for row in rows.items()]


# What depends on the machine, on the version of Python, or on that of matplotlib
VARIES = (
    (r"\(choose from .*?\)", "(choose from …)"),
    (r"\(supported formats: .*?\)", "(supported formats: …)"),
    (r"[\d.,]+ (GiB|cores?)\b", r"… \1"),
    (r"\bat most \d+$", "at most …"),
    (r"the \d+ tokens of the validation text", "the … tokens of the validation text"),  # of this Python's documentation
)


def page(folder: Path) -> str:
    """Return the text of messages.txt: below each command line its sentence."""
    lines = []
    for command, words, _ in all_rows():
        sentence = refusal(command, words, folder).replace(str(folder), "FOLDER")
        for pattern, stand_in in VARIES:
            sentence = re.sub(pattern, stand_in, sentence)
        lines.append(f"{command} {words}\n  {sentence}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        MESSAGES.write_text(page(files(Path(folder))))
