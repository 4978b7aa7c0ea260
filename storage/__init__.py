"""Where experience lives: frames, segments, parameters and the account, behind one protocol."""
