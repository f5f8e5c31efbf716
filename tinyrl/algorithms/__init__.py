"""Pure tensor functions: masking, KL, advantages, losses, preference losses, distillation. Imports torch alone."""
