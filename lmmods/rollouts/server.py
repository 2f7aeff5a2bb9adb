import numpy as np
def sampler_weights(own, sampler, cap):
    return np.minimum(np.exp(own - sampler), cap)
