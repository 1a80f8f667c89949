"""The evaluation of a policy at an evaluation head: worker processes play episodes with the head's actions."""
