// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Life holds the times at which a pod reached its stages, according to the API server.
type Life struct {
	Created, Allocated, Provisioned, Bound, Attached, Ready time.Time
}

// watcher records when pods reach their stages.
type watcher struct {
	mutex sync.Mutex
	lives map[string]*Life // by name of the pod
	pods  map[string]corev1.Pod
	// changed is closed and replaced at every change.
	changed chan struct{}
	stops   []func()
}

// newWatcher watches the pods, claims and ports of a namespace.
func newWatcher(ctx context.Context, c client.WithWatch, namespace string) (*watcher, error) {
	w := &watcher{
		lives: map[string]*Life{}, pods: map[string]corev1.Pod{}, changed: make(chan struct{}),
	}
	for _, list := range []client.ObjectList{
		&corev1.PodList{}, &resourceapi.ResourceClaimList{}, &v1alpha1.XPUPortList{},
	} {
		events, err := c.Watch(ctx, list, client.InNamespace(namespace))
		if err != nil {
			return nil, fmt.Errorf("watch %T: %w", list, err)
		}

		w.stops = append(w.stops, events.Stop)
		go func() {
			for event := range events.ResultChan() {
				w.note(event, time.Now())
			}
		}()
	}

	return w, nil
}

func (w *watcher) stop() {
	for _, stop := range w.stops {
		stop()
	}
}

func (w *watcher) note(event watch.Event, now time.Time) {
	w.mutex.Lock()
	defer w.mutex.Unlock()

	switch object := event.Object.(type) {
	case *corev1.Pod:
		w.notePod(event.Type, object, now)
	case *resourceapi.ResourceClaim:
		w.noteClaim(object, now)
	case *v1alpha1.XPUPort:
		if owner := podOfClaim(object.Spec.Claim.Name); meta.IsStatusConditionTrue(
			object.Status.Conditions, v1alpha1.ConditionReady,
		) {
			first(&w.life(owner).Provisioned, now)
		}
	}

	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *watcher) notePod(kind watch.EventType, pod *corev1.Pod, now time.Time) {
	if kind == watch.Deleted {
		delete(w.pods, pod.Name)
		return
	}

	w.pods[pod.Name] = *pod
	life := w.life(pod.Name)
	first(&life.Created, now)

	if pod.Spec.NodeName != "" {
		first(&life.Bound, now)
	}

	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
			first(&life.Ready, now)
		}
	}
}

func (w *watcher) noteClaim(claim *resourceapi.ResourceClaim, now time.Time) {
	life := w.life(podOfClaim(claim.Name))
	if claim.Status.Allocation != nil {
		first(&life.Allocated, now)
	}
	for _, device := range claim.Status.Devices {
		if meta.IsStatusConditionTrue(device.Conditions, v1alpha1.ConditionReady) {
			first(&life.Attached, now)
		}
	}
}

// podOfClaim returns the pod of a generated claim, which is named "<pod>-nic-<random>".
func podOfClaim(claim string) string {
	pod, _, _ := cutLast(claim, "-nic-")
	return pod
}

func (w *watcher) life(pod string) *Life {
	if w.lives[pod] == nil {
		w.lives[pod] = &Life{}
	}
	return w.lives[pod]
}

func first(t *time.Time, now time.Time) {
	if t.IsZero() {
		*t = now
	}
}

// wait waits until every pod fulfils the condition. The error says which pod does not, and its
// stages so far.
func (w *watcher) wait(
	ctx context.Context, what string, pods []string,
	done func(pod corev1.Pod, exists bool, life Life) bool,
) error {
	for {
		w.mutex.Lock()
		changed, missing := w.changed, ""
		for _, name := range pods {
			pod, exists := w.pods[name]
			if !done(pod, exists, *w.life(name)) {
				missing = name
				break
			}
		}

		w.mutex.Unlock()
		if missing == "" {
			return nil
		}

		select {
		case <-ctx.Done():
			return fmt.Errorf("pod %s is not %s: %w", missing, what, context.Cause(ctx))
		case <-changed:
		}
	}
}
