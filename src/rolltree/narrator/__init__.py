"""What a run or an evaluation is told: facts, conditions on them, and the sentences that follow."""
