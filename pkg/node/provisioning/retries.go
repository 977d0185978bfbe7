package provisioning

import (
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// retries are the pauses between attempts for one Function: 100 ms, then longer and longer up to 10 s.
func retries() *wait.Backoff {
	return loop.Backoff(100*time.Millisecond, 10*time.Second)
}
