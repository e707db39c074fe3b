"""The embedded engine on a GPU."""

import gpu_bodies as bodies


def test_the_engine_beside_the_model(device):
    bodies.engine_beside_the_model(device)
