package kubeapi

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// XPUOf is the XPU that serves a PF of the node, nil if there is none. The caller must not change it.
func (a *API) XPUOf(ctx context.Context, pf pci.Address) (*v1alpha1.XPU, error) {
	var list v1alpha1.XPUList
	if err := a.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUs of node %s: %w", a.node, err)
	}
	return claim.XPUOf(list.Items, pf), nil
}

// XPUAway says why the OPI agent of the Function's xPU cannot be asked, as xpu-controller found. It is "" if it can, if
// the Function has no xPU, and as long as nothing is known.
func (a *API) XPUAway(f function.Function) string {
	select {
	case <-a.synced:
	default:
		return "" // a read would wait
	}
	xpu, err := a.XPUOf(context.Background(), f.PF)
	if err != nil || xpu == nil {
		return ""
	}
	ready := meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Status != metav1.ConditionFalse {
		return ""
	}
	return fmt.Sprintf("XPU %s: %s: %s", xpu.Name, ready.Reason, ready.Message)
}
