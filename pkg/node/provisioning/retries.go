package provisioning

import (
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// retries are the pauses between attempts for one Function: 100 ms, then longer and longer up to 10 s.
func retries() *wait.Backoff {
	return &wait.Backoff{
		Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.2, Cap: 10 * time.Second, Steps: math.MaxInt32,
	}
}
