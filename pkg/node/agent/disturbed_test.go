// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
	"github.com/opiproject/xpu-device-plugin/test/kubelettest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestDisturbed starts and ends pods while the agent, the OPI agent and the kubelet are restarted,
// one after each step of a pod. A step may have to be repeated, but a pod keeps its interface until
// it ends, and in the end every Function is back.
func TestDisturbed(t *testing.T) {
	eachProvisioner(t, func(t *testing.T, s *site) {
		const podsPerFunction = 4
		s.declare(byDevicePlugin(v1alpha1.ProvisionAtAllocate))
		s.start()
		s.wantHealthy(s.vfs...)

		d := &disturbed{
			site: s, steps: make(chan struct{}), again: make(chan struct{}),
			has: map[string]*podresourcesapi.PodResources{},
		}

		var running sync.WaitGroup
		for i, vf := range s.vfs {
			var pods []pod
			for n := range podsPerFunction {
				pods = append(pods, newPod(t, fmt.Sprintf("pod%d-%d", i, n)))
			}

			running.Go(func() {
				for _, p := range pods {
					if err := d.live(p, vf); err != nil {
						t.Errorf("%s: %v", p.name, err)
						return
					}
				}
			})
		}

		go func() { running.Wait(); close(d.steps) }()
		disturb := []func(){
			func() { s.end(); s.start() },
			s.restartOPI,
			func() {
				if err := s.kubelet.Restart(); err != nil {
					t.Error(err)
				}
			},
		}

		n := 0
		for range d.steps {
			disturb[n%len(disturb)]()
			n++
			d.stepDone()
		}

		s.wantHealthy(s.vfs...)
		s.endClean()
	})
}

// disturbed is a site on which several pods live.
type disturbed struct {
	*site
	// steps receives a value when a pod has completed a step.
	steps chan struct{}

	mutex sync.Mutex
	// again is closed after a disturbance, and replaced.
	again chan struct{}
	has   map[string]*podresourcesapi.PodResources
}

func (d *disturbed) stepDone() {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	close(d.again)
	d.again = make(chan struct{})
}

// next returns a channel that is closed after the next disturbance.
func (d *disturbed) next() <-chan struct{} {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.again
}

// set makes the kubelet report that the pod has the Function, or that the pod is gone.
func (d *disturbed) set(p pod, f function.ID, has bool) {
	d.mutex.Lock()
	defer d.mutex.Unlock()

	delete(d.has, p.name)
	if has {
		d.has[p.name] = kubelettest.Pod(p.name, resource, f.String())
	}

	var all []*podresourcesapi.PodResources
	for _, one := range d.has {
		all = append(all, one)
	}

	d.pods.Set(all...)
}

// live runs the life of a pod.
func (d *disturbed) live(p pod, f function.ID) error {
	d.set(p, f, true)
	defer d.set(p, f, false)

	err := d.untilDone(func(ctx context.Context) error {
		_, err := d.kubelet.Allocate(ctx, resource, f.String())
		return err
	})
	if err != nil {
		return fmt.Errorf("Allocate: %w", err)
	}

	d.steps <- struct{}{}
	err = d.untilDone(func(context.Context) error {
		_, err := d.add(p, f)
		if err != nil {
			d.del(p, f) // as runtimes do
		}
		return err
	})

	if err != nil {
		return fmt.Errorf("ADD: %w", err)
	}

	for range 2 {
		next := d.next()
		d.steps <- struct{}{}
		<-next
		l, err := p.Handle().LinkByName("net1")
		if err != nil {
			return fmt.Errorf("net1 is not there any more: %w", err)
		}
		if mac := string(provisioning.MAC(nodeName, f)); l.Attrs().HardwareAddr.String() != mac {
			return fmt.Errorf("net1 has MAC %s, want %s", l.Attrs().HardwareAddr, mac)
		}
	}

	d.del(p, f)
	return nil
}

// untilDone retries a call that fails while a program is being restarted.
func (d *disturbed) untilDone(try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(d.t.Context(), 30*time.Second)
	defer cancel()
	return must.Retry(ctx, func() error { return try(ctx) })
}
