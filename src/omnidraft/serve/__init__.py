"""An OpenAI-compatible server (extra `serve`): HTTP in front, one worker thread behind, which owns the models."""
