// SPDX-License-Identifier: Apache-2.0

package story

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/dashboard"
)

// serviceCard cordons a card. The scheduler then leaves a pod of its node pending, and takes a Function
// of the card as soon as the cordon is taken back.
func (w *World) serviceCard(ctx context.Context) error {
	const pod, card = "new-pod", "xpu-1"
	node := w.xpus[0].node.Name
	out, err := w.xpuctl(ctx, "cordon", "xpu", card, "--reason=new firmware")
	if err != nil {
		return err
	}
	w.printCommand(`xpuctl cordon xpu `+card+` --reason="new firmware"`, out)

	if err := w.waitForCordon(ctx, node); err != nil {
		return err
	}
	if err := w.createPodWithClaims(ctx, pod, node, `"network": "blue"`); err != nil {
		return err
	}
	// A cluster without taints of devices does not have the devices at all.
	isTold := regexp.MustCompile(`.*(tainted ` + v1alpha1.TaintCordoned + `|can have 0 ).*`)
	err = poll(ctx, 30*time.Second, "xpuctl explains why "+pod+" is pending",
		func(ctx context.Context) error {
			out, err := w.xpuctl(ctx, "explain", "pod", pod, "--namespace=default")
			why := isTold.FindString(out)
			if err == nil || why == "" {
				return fmt.Errorf("it says\n%s", out)
			}
			w.Detail("%s is pending: %s", pod, strings.TrimSpace(why))
			return nil
		})
	if err != nil {
		return err
	}

	if out, err = w.xpuctl(ctx, "uncordon", "xpu", card); err != nil {
		return err
	}
	w.printCommand("xpuctl uncordon xpu "+card, out)
	if err := w.waitForPod(ctx, pod); err != nil {
		return err
	}

	w.Detail("%s is Ready", pod)
	return w.deletePodsAndWait(ctx, pod)
}

// waitForCordon waits until the agent of a node offers no device without the taint.
func (w *World) waitForCordon(ctx context.Context, node string) error {
	return poll(ctx, 30*time.Second, "the devices of "+node+" are tainted",
		func(ctx context.Context) error {
			devices, err := w.devicesOf(ctx, node)
			if err != nil {
				return err
			}
			isCordoned := func(t resourceapi.DeviceTaint) bool {
				return t.Key == v1alpha1.TaintCordoned
			}
			for _, device := range devices {
				if !slices.ContainsFunc(device.Taints, isCordoned) {
					return fmt.Errorf("device %s is not", device.Name)
				}
			}
			return nil
		})
}

// showDashboard starts the dashboard for a moment, and reads its page and its data as a browser does.
func (w *World) showDashboard(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()

	cmd := exec.CommandContext(ctx, filepath.Join(w.Bin, "xpuctl"), "dashboard",
		"--kubeconfig="+w.cluster.Kubeconfig)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("xpuctl dashboard: %w", err)
	}
	defer func() {
		stop()
		_ = cmd.Wait() // it was killed
	}()

	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return fmt.Errorf("xpuctl dashboard prints no address: %w", err)
	}
	address = strings.TrimSpace(address)
	title, err := pageTitle(ctx, address)
	if err != nil {
		return err
	}
	state, err := dashboardState(ctx, address)
	if err != nil {
		return err
	}

	w.Detail("$ xpuctl dashboard")
	w.Detail("  %s", address)
	w.Detail("  page %q; %s", title, state)
	return nil
}

// pageTitle returns the title of a page.
func pageTitle(ctx context.Context, address string) (string, error) {
	response, err := get(ctx, address)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if _, rest, found := strings.Cut(lines.Text(), "<title>"); found {
			title, _, _ := strings.Cut(rest, "</title>")
			return title, nil
		}
	}
	return "", errors.Join(fmt.Errorf("%s: the page has no title", address), lines.Err())
}

// dashboardState reads the events of the page until they tell of the whole cluster, and says what is
// wrong in it.
func dashboardState(ctx context.Context, address string) (string, error) {
	response, err := get(ctx, address+"events")
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	nodes := map[string]bool{}
	for lines.Scan() {
		data, isData := strings.CutPrefix(lines.Text(), "data: ")
		var records struct {
			Set map[string]json.RawMessage `json:"set"`
		}
		if !isData || json.Unmarshal([]byte(data), &records) != nil {
			continue
		}

		for key := range records.Set {
			if name, isNode := strings.CutPrefix(key, "node/"); isNode {
				nodes[name] = true
			}
		}

		var overview dashboard.Overview
		if text := records.Set["overview"]; text == nil ||
			json.Unmarshal(text, &overview) != nil || overview.Reading {
			continue
		}
		// A second reader of the kernel cannot be asked about simulated cards.
		wrong := slices.DeleteFunc(overview.Wrong, func(w dashboard.Wrong) bool {
			return strings.HasPrefix(w.Text, v1alpha1.ConditionInventoryVerified+" ")
		})
		if len(wrong) > 0 {
			return "", fmt.Errorf("the dashboard says that something is wrong: %+v", wrong)
		}
		return fmt.Sprintf("%d nodes, and nothing is wrong", len(nodes)), nil
	}
	return "", errors.Join(errors.New("the dashboard's events do not tell of the cluster"), lines.Err())
}

// get requests an address, and fails for other answers than 200.
func get(ctx context.Context, address string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		response.Body.Close()
		return nil, fmt.Errorf("%s: %s", address, response.Status)
	}
	return response, nil
}
