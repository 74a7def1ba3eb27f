"""Training with PyTorch Lightning's Trainer."""
