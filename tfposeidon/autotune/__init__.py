"""Chooses communication plans by predicted and measured training steps: the policy `auto`."""
