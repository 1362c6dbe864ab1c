def start(*a): raise NotImplementedError
