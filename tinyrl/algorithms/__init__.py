"""Pure tensor functions: masking, KL, reward shaping, advantages, losses, flow matching. Imports torch alone."""
