"""The five roles that join storage and algorithms: agent, replay, learner, evaluator, monitor."""
