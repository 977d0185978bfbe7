// SPDX-License-Identifier: Apache-2.0

package connectivity

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
)

// pod is a pod of a test.
type pod struct {
	name, node, network string

	begin   time.Time        // before its creation
	ready   time.Duration    // from its creation; 0 if it is not Ready
	found   *wire.Interface  // nil if the pod has not said how it is
	reports chan wire.Report // closed when the log ends
	said    []string         // the last lines of the log that are no reports; read when it has ended
}

func (p *pod) String() string { return p.name + " on " + p.node }

// checkReady waits until the pods are Ready, or until the time is over.
func (t *Test) checkReady(ctx context.Context) ([]Check, error) {
	begin := time.Now()
	waiting, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()

	last := map[string]corev1.Pod{}
	err := t.watchPods(waiting, func(pods map[string]corev1.Pod) bool {
		last = pods
		left := 0
		for _, p := range t.pods {
			if isReady(pods[p.name]) && p.ready == 0 {
				p.ready = time.Since(p.begin)
			}
			if p.ready == 0 {
				left++
			}
		}
		return left == 0
	})
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil && waiting.Err() == nil {
		return nil, err
	}

	var checks []Check
	for _, n := range t.networks {
		c := t.readyOf(n.Name, last)
		if !c.OK {
			c.Took = time.Since(begin)
		}
		checks = append(checks, c)
	}
	return checks, nil
}

// readyOf says how many pods of a network are Ready, and when.
func (t *Test) readyOf(network string, last map[string]corev1.Pod) Check {
	c := Check{OK: true}
	ready, all := 0, 0
	var fastest time.Duration
	for _, p := range t.pods {
		if p.network != network {
			continue
		}

		all++
		if p.ready == 0 && t.isFull(last[p.name]) {
			c.lacks(fmt.Sprintf("%s: not tested: no free Function there", p))
			continue
		}
		if p.ready == 0 {
			t.fails(&c, p, "%s", notReady(last[p.name]))
			continue
		}
		if ready++; fastest == 0 || p.ready < fastest {
			fastest = p.ready
		}
		c.Took = max(c.Took, p.ready)
	}

	c.Name = fmt.Sprintf("%s: %d of %d pods are Ready", network, ready, all)
	if ready > 1 {
		c.Name += fmt.Sprintf(", the first after %s", fastest.Round(time.Millisecond))
	}
	return c
}

func isReady(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// isFull reports whether a pod has no node because the scheduler has found no free Function for it.
// The plugins DynamicResources and NodeResourcesFit of kube-scheduler write these sentences.
func (t *Test) isFull(p corev1.Pod) bool {
	lacks := "cannot allocate all claims"
	if t.Resource != "" {
		lacks = "Insufficient " + t.Resource
	}
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse &&
			strings.Contains(c.Message, lacks)
	})
}

// notReady returns why a pod is not Ready, as far as its status says.
func notReady(p corev1.Pod) string {
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Message != "" {
			return w.Reason + ": " + w.Message
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return "it has no node: " + c.Message
		}
	}
	if p.Name == "" {
		return "it is gone"
	}
	return fmt.Sprintf("it is %s, and not Ready", p.Status.Phase)
}

// watchPods follows the pods of the test until done returns true.
func (t *Test) watchPods(ctx context.Context, done func(map[string]corev1.Pod) bool) error {
	return watchPods(ctx, t.API, t.namespace, client.MatchingLabels(t.labels()), done)
}

func watchPods(
	ctx context.Context, api client.WithWatch, namespace string, selected client.ListOption,
	done func(map[string]corev1.Pod) bool,
) error {
	options := &client.ListOptions{Namespace: namespace}
	selected.ApplyToList(options)
	for {
		var list corev1.PodList
		if err := api.List(ctx, &list, options); err != nil {
			return fmt.Errorf("list the pods of the test: %w", err)
		}
		pods := map[string]corev1.Pod{}
		for _, p := range list.Items {
			pods[p.Name] = p
		}
		if done(pods) {
			return nil
		}

		since := *options
		since.Raw = &metav1.ListOptions{ResourceVersion: list.ResourceVersion}
		events, err := api.Watch(ctx, &corev1.PodList{}, &since)
		if err != nil {
			return fmt.Errorf("watch the pods of the test: %w", err)
		}
		if follow(ctx, events, pods, done) {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// follow applies events until done returns true. It returns false if the API server ends the watch,
// which happens from time to time, or if ctx ends.
func follow(
	ctx context.Context, events watch.Interface, pods map[string]corev1.Pod,
	done func(map[string]corev1.Pod) bool,
) bool {
	defer events.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case event, open := <-events.ResultChan():
			p, isPod := event.Object.(*corev1.Pod)
			if !open || !isPod {
				return false
			}

			pods[p.Name] = *p
			if event.Type == watch.Deleted {
				delete(pods, p.Name)
			}
			if done(pods) {
				return true
			}
		}
	}
}

// Bounds of what is read of a log.
const (
	mostLog  = 8 << 20 // bytes
	mostSaid = 5       // lines
)

// readLog passes on the reports in a pod's log until it or ctx ends. The log must be open when
// waiting ends.
func (t *Test) readLog(ctx, waiting context.Context, p *pod) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(waiting, cancel)
	log, err := t.Log(ctx, t.namespace, p.name)
	if inTime := stop(); !inTime {
		if err == nil {
			_ = log.Close()
		}
		err = errors.New("its kubelet does not send it in time")
	}
	if err != nil {
		cancel()
		return fmt.Errorf("its log cannot be read: %w", err)
	}

	p.reports = make(chan wire.Report)
	go func() {
		defer cancel()
		defer close(p.reports)
		defer log.Close()
		lines := bufio.NewScanner(io.LimitReader(log, mostLog))
		lines.Buffer(nil, wire.MaxLine)
		for lines.Scan() {
			var r wire.Report
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				p.said = append(p.said, lines.Text())
				p.said = p.said[max(0, len(p.said)-mostSaid):]
				continue
			}

			select {
			case p.reports <- r:
			case <-ctx.Done():
				return
			}
		}
	}()

	return nil
}

// report returns the report about an order; 0 is for the report about the interface.
func (p *pod) report(ctx context.Context, order int) (wire.Report, error) {
	for {
		select {
		case <-ctx.Done():
			return wire.Report{}, errors.New("it has not reported in time")
		case r, open := <-p.reports:
			switch {
			case !open && len(p.said) > 0:
				return r, errors.New("its program has ended: " + strings.Join(p.said, " / "))
			case !open:
				return r, errors.New("its log has ended")
			case r.Error != "":
				return r, errors.New(r.Error)
			case r.Order == order:
				return r, nil
			}
		}
	}
}

// give writes an order to a pod.
func (t *Test) give(ctx context.Context, p *pod, o wire.Order) error {
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{wire.AnnotationOrder: string(text)}}})
	if err != nil {
		return err
	}

	object := &corev1.Pod{}
	object.Namespace, object.Name = t.namespace, p.name
	if err := t.API.Patch(ctx, object, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("it gets no order: %w", err)
	}
	return nil
}
