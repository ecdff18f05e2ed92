"""SymExpLin (SEL) for PEFT: fine-tune dense weights in a curved space, merge back to an ordinary checkpoint."""
