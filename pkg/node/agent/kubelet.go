// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// refreshTimeout limits how long publishing pools is delayed by a kubelet that does not answer.
const refreshTimeout = 2 * time.Second

// kubelet knows which Functions the kubelet has given to pods.
type kubelet struct {
	pods *podresources.Client
	// changed is called when the kubelet's answer has changed.
	changed func()
	// unanswered says that the kubelet did not answer the last question.
	unanswered atomic.Bool
}

// newKubelet returns a client of the node's kubelet. The caller must close its pods. auxiliary
// returns the SF that has an auxiliary device of this name.
func newKubelet(
	env *environment, auxiliary func(name string) (id function.ID, exists bool),
) (*kubelet, error) {
	pods, err := podresources.NewClient(podresources.Options{
		KubeletDir:     env.config.KubeletDir,
		Self:           podresources.Self{Namespace: env.config.Namespace, Name: env.config.PodName},
		HasAdminAccess: env.journal.HasAdminAccess,
		Auxiliary:      auxiliary,
		Log:            env.log.WithName("kubelet"),
	})
	return &kubelet{pods: pods, changed: env.outputs.Notify}, err
}

// refresh asks the kubelet which Functions pods have. While the kubelet does not answer, its last
// answer counts.
func (k *kubelet) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	different, err := k.pods.Refresh(ctx)
	k.unanswered.Store(err != nil)
	if different {
		k.changed()
	}
}

// mayBeInUse reports whether a pod may have the Function by an extended resource: the kubelet's
// last answer says so, or the kubelet did not answer. The journal is not used.
func (k *kubelet) mayBeInUse(id function.ID) bool {
	return k.unanswered.Load() || k.pods.InUse(id, "") != ""
}
