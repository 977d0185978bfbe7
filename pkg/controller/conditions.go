package controller

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// problem is why something cannot go on, as it is told to people in conditions and events.
type problem struct {
	reason  string        // one of the Reason constants of the API
	message string        // one sentence: which object or field, and what would be right
	retry   time.Duration // pause before the next attempt; 0 means that an event will come
}

func (p *problem) Error() string { return p.reason + ": " + p.message }

func problemf(reason, format string, args ...any) *problem {
	return &problem{reason: reason, message: fmt.Sprintf(format, args...)}
}

// refused tells whether a Port with this reason is refused for good.
func refused(reason string) bool {
	return reason == v1alpha1.ReasonConflict || reason == v1alpha1.ReasonFailed
}

// oneLine makes a joined error fit a condition's message.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// newCondition returns a condition that is true if the reason is a good one.
func newCondition(conditionType string, generation int64, reason, message string) metav1.Condition {
	status := metav1.ConditionFalse
	switch reason {
	case v1alpha1.ReasonUp, v1alpha1.ReasonNoPortNeeded, v1alpha1.ReasonConnected, v1alpha1.ReasonPublished, v1alpha1.ReasonAllMade:
		status = metav1.ConditionTrue
	}
	return metav1.Condition{Type: conditionType, Status: status, Reason: reason, Message: message, ObservedGeneration: generation}
}

// setReady sets the Ready condition of an object and writes its status, if that differs from before. It tells whether
// the reason is news. Bad news are told in an event.
func (r *base) setReady(
	ctx context.Context, object, before client.Object, conditions *[]metav1.Condition, reason, message string,
) (news bool, err error) {
	was := ptr.Deref(meta.FindStatusCondition(*conditions, v1alpha1.ConditionReady), metav1.Condition{})
	ready := newCondition(v1alpha1.ConditionReady, object.GetGeneration(), reason, message)
	meta.SetStatusCondition(conditions, ready)
	if err := r.writeStatus(ctx, object, before); err != nil {
		return false, err
	}
	news = was.Reason != reason
	if news && ready.Status == metav1.ConditionFalse {
		r.events.Eventf(object, nil, corev1.EventTypeWarning, reason, "Provision", "%s", message)
	}
	return news, nil
}
