// SPDX-License-Identifier: Apache-2.0

package story

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	promapi "github.com/prometheus/client_golang/api"
	promv1 "github.com/prometheus/client_golang/api/prometheus/v1"
	"github.com/prometheus/common/model"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// dashboardTime is how long pods start and end, because the dashboard's rates cover five minutes.
const dashboardTime = 8 * time.Minute

// DashboardSteps run Prometheus with the product, and write the results of the dashboard's queries
// to a file, for a picture.
func (w *World) DashboardSteps(out string) []Step {
	return append(w.claimSteps()[:4],
		Step{"Pools for the device plugin beside those for claims", w.declareResources},
		Step{"Prometheus scrapes agents, controllers and opi-bridge", w.startPrometheus},
		Step{"Pods come and go, two exchange packets, and an OPI agent is away for a while",
			w.makeHistory},
		Step{"What the dashboard shows", func(ctx context.Context) error {
			return w.writeDashboard(ctx, out)
		}},
	)
}

const (
	bridgeMetricsPort = "9811"
	prometheusAddress = "127.0.0.1:9090" // in the cluster's network namespace
)

func (w *World) startPrometheus(ctx context.Context) error {
	type target struct {
		Targets []string          `json:"targets"`
		Labels  map[string]string `json:"labels"`
	}

	jobs := map[string][]target{}
	add := func(job, address, instance string) {
		jobs[job] = append(jobs[job],
			target{[]string{address}, map[string]string{"instance": instance}})
	}

	for _, node := range w.cluster.Nodes {
		add("xpu-agent", net.JoinHostPort(node.IP, "9810"), node.Name)
	}

	for _, x := range w.xpus {
		add("opi-bridge", net.JoinHostPort(x.address, bridgeMetricsPort), x.node.Name)
	}

	var pods corev1.PodList
	if err := w.client.List(ctx, &pods, client.InNamespace(namespace),
		client.MatchingLabels{"app.kubernetes.io/name": "xpu-controller"}); err != nil {
		return err
	}

	for _, pod := range pods.Items {
		add("xpu-controller", net.JoinHostPort(pod.Status.PodIP, "8080"), pod.Name)
	}

	var scrapes []map[string]any
	for job, targets := range jobs {
		scrapes = append(scrapes, map[string]any{"job_name": job, "static_configs": targets})
	}

	config, err := yaml.Marshal(map[string]any{
		"global": map[string]any{"scrape_interval": "5s"}, "scrape_configs": scrapes,
	})
	if err != nil {
		return err
	}

	file := filepath.Join(w.dir, "prometheus.yaml")
	if err := os.WriteFile(file, config, 0o600); err != nil {
		return err
	}

	if _, err := w.start("prometheus", w.cluster.NetNS, filepath.Join(w.Bin, "prometheus"),
		"--config.file="+file,
		"--storage.tsdb.path="+filepath.Join(w.dir, "prometheus"), "--web.listen-address="+
			prometheusAddress); err != nil {
		return err
	}

	return poll(ctx, time.Minute, "Prometheus reaches all targets",
		func(ctx context.Context) error {
			query, err := w.prometheus()
			if err != nil {
				return err
			}

			found, err := query.Targets(ctx)
			if err != nil {
				return err
			}

			for _, t := range found.Active {
				if t.Health != promv1.HealthGood {
					return fmt.Errorf("%s is %s: %s", t.ScrapeURL, t.Health, t.LastError)
				}
			}

			if len(found.Active) == 0 {
				return errors.New("it has no target yet")
			}

			w.Detail("%d targets", len(found.Active))
			return nil
		})
}

// prometheus returns a client of the started Prometheus.
func (w *World) prometheus() (promv1.API, error) {
	dial := func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = netns.In(w.cluster.NetNS, func() error {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}

	c, err := promapi.NewClient(promapi.Config{
		Address: "http://" + prometheusAddress, RoundTripper: &http.Transport{DialContext: dial},
	})
	if err != nil {
		return nil, err
	}

	return promv1.NewAPI(c), nil
}

func (w *World) makeHistory(ctx context.Context) error {
	if err := errors.Join(w.startClaimedPeerPods(ctx), w.startPeerPods(ctx)); err != nil {
		return err
	}

	packets, err := sendPackets("10.10.0.21", "10.10.0.22")
	if err != nil {
		return err
	}

	churning, stop := context.WithTimeout(ctx, dashboardTime)
	defer stop()

	pods := errgroup.Group{}
	for i := range churners {
		pods.Go(func() error {
			for n := 0; churning.Err() == nil; n++ {
				if err := w.liveOnce(churning, i, n); err != nil && churning.Err() == nil {
					w.Detail("%v", err) // an OPI agent is away for some time
				}
				loop.Sleep(churning, churnPause)
			}
			return nil
		})
	}

	loop.Sleep(ctx, dashboardTime/2)
	x := w.xpus[1]
	if err := w.stopProcess(ctx, "opi-bridge-"+x.node.Name, syscall.SIGKILL); err != nil {
		return err
	}

	loop.Sleep(ctx, 30*time.Second)
	if err := errors.Join(w.startBridge(ctx, x), pods.Wait()); err != nil {
		return err
	}

	return w.checkNoneLost(packets)
}

// panel is the data of a panel of the dashboard.
type panel struct {
	Type    string         `json:"type"`
	Title   string         `json:"title"`
	GridPos map[string]int `json:"gridPos"`
	Unit    string         `json:"unit"`
	Series  []series       `json:"series"`
}

// series is a line of a panel: pairs of Unix time in milliseconds and value, or null for no value.
type series struct {
	Name   string        `json:"name"`
	Points [][2]*float64 `json:"points"`
}

// writeDashboard evaluates the queries of deploy/monitoring/dashboard.json over the time in which
// there were pods.
func (w *World) writeDashboard(ctx context.Context, out string) error {
	content, err := os.ReadFile(filepath.Join(w.Source, "deploy/monitoring/dashboard.json"))
	if err != nil {
		return err
	}

	var dashboard struct {
		Panels []struct {
			Type, Title string
			GridPos     map[string]int
			FieldConfig struct{ Defaults struct{ Unit string } }
			Targets     []struct{ Expr, LegendFormat string }
		}
	}

	if err := json.Unmarshal(content, &dashboard); err != nil {
		return fmt.Errorf("dashboard.json: %w", err)
	}

	query, err := w.prometheus()
	if err != nil {
		return err
	}

	end := time.Now()
	when := promv1.Range{Start: end.Add(-dashboardTime), End: end, Step: 5 * time.Second}
	var panels []panel
	for _, p := range dashboard.Panels {
		shown := panel{
			Type: p.Type, Title: p.Title, GridPos: p.GridPos, Unit: p.FieldConfig.Defaults.Unit,
			Series: []series{},
		}

		for _, t := range p.Targets {
			value, _, err := query.QueryRange(ctx, strings.ReplaceAll(t.Expr, "$node", ".*"), when)
			if err != nil {
				return fmt.Errorf("panel %s: %w", p.Title, err)
			}

			matrix, ok := value.(model.Matrix)
			if !ok {
				return fmt.Errorf("panel %s: %s gives %s, not series", p.Title, t.Expr,
					value.Type())
			}

			for _, line := range matrix {
				shown.Series = append(shown.Series, seriesOf(line, t.LegendFormat))
			}
		}

		w.Detail("%s: %d series", p.Title, len(shown.Series))
		panels = append(panels, shown)
	}

	if content, err = json.Marshal(panels); err != nil {
		return err
	}

	return os.WriteFile(out, content, 0o644)
}

func seriesOf(line *model.SampleStream, legend string) series {
	var replacements []string
	for name, value := range line.Metric {
		replacements = append(replacements, "{{"+string(name)+"}}", string(value))
	}

	name := strings.NewReplacer(replacements...).Replace(legend)
	for { // a label that a series lacks is empty
		before, rest, found := strings.Cut(name, "{{")
		if !found {
			break
		}
		_, after, _ := strings.Cut(rest, "}}")
		name = before + after
	}

	s := series{Name: strings.TrimSpace(name)}
	for _, sample := range line.Values {
		at, value := float64(sample.Timestamp), float64(sample.Value)
		point := [2]*float64{&at, &value}
		if math.IsNaN(value) || math.IsInf(value, 0) { // quantiles without samples
			point[1] = nil
		}
		s.Points = append(s.Points, point)
	}

	return s
}
