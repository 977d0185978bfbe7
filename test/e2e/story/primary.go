// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// The network green of manifests/primary.yaml.
const (
	greenVNI     = 10050
	greenGateway = "10.50.0.1/24"
)

// runOnVFAlone runs pods whose only interface is a VF: the kubelet probes them over it, a Service
// leads to them, and their metrics are scraped. Without the route through the fabric they are not
// ready.
func (w *World) runOnVFAlone(ctx context.Context) error {
	if err := w.fabric.route(greenVNI, greenGateway); err != nil {
		return err
	}

	manifest := filepath.Join(w.Source, "test/e2e/manifests/primary.yaml")
	if _, err := w.Cluster.Kubectl(ctx, "apply", "-f", manifest); err != nil {
		return err
	}
	if _, err := w.Cluster.Kubectl(ctx, "rollout", "status", "deployment/web",
		"--timeout=60s"); err != nil {
		return err
	}

	pods, err := w.podsOfWeb(ctx)
	if err != nil {
		return err
	}

	for _, pod := range pods {
		if err := w.checkOnlyVF(ctx, pod); err != nil {
			return fmt.Errorf("pod %s: %w", pod.Name, err)
		}
	}

	// pods on the cluster's network, like a monitoring system
	clients := []resourcePod{{name: "client-1", node: "node1"}, {name: "client-2", node: "node2"}}
	for _, c := range clients {
		if err := w.startClient(ctx, c); err != nil {
			return err
		}
	}

	if err := w.checkService(ctx, pods, clients); err != nil {
		return err
	}
	if err := w.checkScrape(ctx, pods, clients[0].name); err != nil {
		return err
	}
	if err := w.probesGoThroughTheFabric(ctx); err != nil {
		return err
	}

	for _, c := range clients {
		if err := w.deletePod(ctx, c.name); err != nil {
			return err
		}
	}

	if _, err := w.Cluster.Kubectl(ctx, "delete", "-f", manifest, "--timeout=60s"); err != nil {
		return err
	}

	return w.fabric.unroute(greenVNI)
}

func (w *World) podsOfWeb(ctx context.Context) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := w.client.List(ctx, &pods, client.InNamespace("default"),
		client.MatchingLabels{"app": "web"}); err != nil {
		return nil, err
	}
	if len(pods.Items) != 2 || pods.Items[0].Spec.NodeName == pods.Items[1].Spec.NodeName {
		return nil, fmt.Errorf("Deployment web has %d pods, want one on each node", len(pods.Items))
	}
	return pods.Items, nil
}

// checkOnlyVF checks that a pod has exactly one interface, that it is a VF, and that its address is
// the pod's.
func (w *World) checkOnlyVF(ctx context.Context, pod corev1.Pod) error {
	text := pod.Annotations["k8s.v1.cni.cncf.io/network-status"]
	var all []status
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return fmt.Errorf("network-status %q: %w", text, err)
	}

	var ports v1alpha1.XPUPortList
	if err := w.client.List(ctx, &ports); err != nil {
		return err
	}

	i := slices.IndexFunc(ports.Items, func(p v1alpha1.XPUPort) bool {
		return p.Spec.Pod != nil &&
			p.Spec.Pod.Name == pod.Name
	})

	switch {
	case len(all) != 1 || all[0].Name != "default/green" || all[0].Interface != "eth0":
		return fmt.Errorf("network-status is not of eth0 on green alone: %s", text)
	case !slices.Equal(all[0].IPs, []string{pod.Status.PodIP}):
		return fmt.Errorf("its address is %s, want that of eth0: %s", pod.Status.PodIP, text)
	case i < 0 || ports.Items[i].Spec.MAC != all[0].MAC:
		return fmt.Errorf("no XPUPort has its MAC address: %s", text)
	}

	w.Detail("%s on %s: eth0 is VF %s; the kubelet probes it at %s", pod.Name, pod.Spec.NodeName,
		claim.FunctionOf(ports.Items[i].Spec.Function), pod.Status.PodIP)
	return nil
}

// startClient starts a pod on only the cluster's network.
func (w *World) startClient(ctx context.Context, p resourcePod) error {
	pod, err := p.pod()
	if err != nil {
		return err
	}

	pod.Annotations = nil
	if err := w.client.Create(ctx, pod); err != nil {
		return err
	}
	return w.waitForPod(ctx, p.name)
}

// checkService checks that every client reaches every pod through the Service's address.
func (w *World) checkService(ctx context.Context, pods []corev1.Pod, clients []resourcePod) error {
	var service corev1.Service
	if err := w.client.Get(ctx, types.NamespacedName{Namespace: "default", Name: "web"},
		&service); err != nil {
		return err
	}

	for _, c := range clients {
		answered := map[string]bool{}
		err := poll(ctx, 30*time.Second, "Service web leads "+c.name+" to both pods",
			func(ctx context.Context) error {
				out, err := w.Cluster.Kubectl(ctx, "exec", c.name, "--", "/pause", "get",
					"http://"+service.Spec.ClusterIP)
				if err != nil {
					return err
				}

				name, _, _ := strings.Cut(out, " ")
				answered[name] = true
				for _, pod := range pods {
					if !answered[pod.Name] {
						return fmt.Errorf("%s did not answer yet", pod.Name)
					}
				}

				return nil
			})

		if err != nil {
			return err
		}

		w.Detail("%s on %s reaches both by Service web, %s", c.name, c.node, service.Spec.ClusterIP)
	}

	return nil
}

// checkScrape checks that the pods' metrics can be read at their addresses, like Prometheus does.
func (w *World) checkScrape(ctx context.Context, pods []corev1.Pod, from string) error {
	for _, pod := range pods {
		out, err := w.Cluster.Kubectl(ctx, "exec", from, "--", "/pause",
			"get", "http://"+pod.Status.PodIP+":8080/metrics")
		if err != nil {
			return err
		}

		_, sample, found := strings.Cut(out, "\nhttp_requests_total ")
		if !found {
			return fmt.Errorf("pod %s has metrics\n%s", pod.Name, out)
		}

		w.Detail("%s scrapes %s: http_requests_total %s", from, pod.Name, strings.TrimSpace(sample))
	}
	return nil
}

// probesGoThroughTheFabric removes the gateway, and checks that the pods are not ready and get no
// traffic of the Service until it is back.
func (w *World) probesGoThroughTheFabric(ctx context.Context) error {
	if err := w.fabric.unroute(greenVNI); err != nil {
		return err
	}
	if err := w.readyEndpoints(ctx, 0); err != nil {
		return err
	}
	if err := w.fabric.route(greenVNI, greenGateway); err != nil {
		return err
	}
	if err := w.readyEndpoints(ctx, 2); err != nil {
		return err
	}

	w.Detail("without the network's gateway the probes fail and Service web leads nowhere; with " +
		"it all is well again")
	return nil
}

// readyEndpoints waits until Service web has that many ready endpoints.
func (w *World) readyEndpoints(ctx context.Context, want int) error {
	return poll(ctx, 30*time.Second, fmt.Sprintf("Service web has %d ready endpoints", want),
		func(ctx context.Context) error {
			var list discoveryv1.EndpointSliceList
			labels := client.MatchingLabels{discoveryv1.LabelServiceName: "web"}
			if err := w.client.List(ctx, &list, client.InNamespace("default"), labels); err != nil {
				return err
			}

			ready := 0
			for _, slice := range list.Items {
				for _, endpoint := range slice.Endpoints {
					if endpoint.Conditions.Ready != nil && *endpoint.Conditions.Ready {
						ready++
					}
				}
			}

			if ready != want {
				return errors.New("it has " + fmt.Sprint(ready))
			}

			return nil
		})
}
