"""Mixtures of experts under every way to spread them, against plain torch: loss, gradients, norm, and the weights after two steps."""

import pytest
import torch
from conftest import agree
from oracle_experts import microbatch_loss

from mpitrain import config as settings
from mpitrain.actor.actor import Actor
from mpitrain.layout.resolve import resolve
from mpitrain.model.families.catalog import plan_of
from mpitrain.training.trainer import build_mesh
from mpitrain.verify_helpers import part if False else None
