// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"time"

	"k8s.io/client-go/util/workqueue"
)

// The pauses between failed attempts double from FirstRetry to LastRetry.
const (
	FirstRetry = 50 * time.Millisecond
	LastRetry  = 30 * time.Second
)

// RetryLimiter spaces attempts for one object. The default of controller-runtime also has a limit
// over all objects, with which the objects of a healthy xPU would wait for the objects of an
// unhealthy one.
func RetryLimiter[R comparable]() workqueue.TypedRateLimiter[R] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[R](FirstRetry, LastRetry)
}
