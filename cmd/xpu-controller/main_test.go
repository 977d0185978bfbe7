// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/pkg/broker"
	"github.com/opiproject/xpu-device-plugin/pkg/controller"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// asProgram has the test's binary be the command.
const asProgram = "RUN_XPU_CONTROLLER"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// TestRun: in each role the command starts, is elected, is ready, serves its metrics, and ends on a
// signal.
func TestRun(t *testing.T) {
	needs.Kubernetes(t)

	environment := &envtest.Environment{
		CRDDirectoryPaths:        []string{filepath.Join("..", "..", "deploy", "crds")},
		ErrorIfCRDPathMissing:    true,
		ControlPlaneStartTimeout: time.Minute,
	}

	config, err := environment.Start()
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := environment.Stop(); err != nil {
			t.Error(err)
		}
	})

	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, environment.KubeConfig, 0o600); err != nil {
		t.Fatal(err)
	}

	direct, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}

	for role, want := range map[string]struct {
		lease, metric string
		secure        bool // metrics are for those whom the API server lets read them
	}{
		"all":    {"xpu-controller", "xpu_port_provisioning_seconds_count 0", false},
		"tenant": {"xpu-controller", `controller="broker"`, false},
		"infra":  {"xpu-controller", "A bearer token is needed", true},
		"broker": {"xpu-broker", `controller="xputenant"`, false},
	} {
		t.Run(role, func(t *testing.T) {
			metricsAddr, probeAddr := freeAddress(t), freeAddress(t)
			webhookAddr := "0"
			if role == "all" || role == "tenant" {
				webhookAddr = freeAddress(t)
			}
			c := exec.CommandContext(t.Context(), os.Args[0], "--role", role, "--kubeconfig",
				kubeconfig, "--namespace", "default",
				"--leader-elect", "--metrics-bind-address", metricsAddr,
				"--health-probe-bind-address", probeAddr, "--log-format", "json",
				"--webhook-bind-address", webhookAddr, "--webhook-cert-dir", t.TempDir(),
				"--metrics-secure="+strconv.FormatBool(want.secure))

			c.Env = append(os.Environ(), asProgram+"=1")
			var logs bytes.Buffer
			c.Stdout, c.Stderr = &logs, &logs
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}

			eventually(t, func() error {
				_, err := fetch("http://" + probeAddr + "/readyz")
				return err
			})

			eventually(t, func() error {
				_, err := fetch("http://" + probeAddr + "/healthz")
				return err
			})

			eventually(t, func() error {
				scheme := map[bool]string{false: "http", true: "https"}[want.secure]
				text, err := fetch(scheme + "://" + metricsAddr + "/metrics")
				if strings.Contains(text, want.metric) {
					return nil
				}
				return fmt.Errorf("no %s in %.200s: %w", want.metric, text, err)
			})

			eventually(t, func() error {
				var lease coordinationv1.Lease
				err := direct.Get(t.Context(),
					client.ObjectKey{Namespace: "default", Name: want.lease}, &lease)
				if err == nil &&
					(lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "") {
					err = fmt.Errorf("the Lease has no holder")
				}
				return err
			})

			if webhookAddr != "0" {
				eventually(t, func() error {
					connection, err := net.Dial("tcp", webhookAddr)
					if err != nil {
						return err
					}
					return connection.Close()
				})
			}

			if err := c.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := c.Wait(); err != nil {
				t.Errorf("%v\n%s", err, &logs)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	good := options{
		role: "all", limits: broker.DefaultLimits(), controller: controller.Options{
			Namespace: "xpu-system", ProvisionTimeout: time.Minute, AgentTimeout: time.Second,
			ResyncPeriod: time.Minute, GangTimeout: time.Minute,
		},
	}

	for _, profiles := range []string{"", "0", "127.0.0.1:6060", "localhost:6060", "[::1]:0"} {
		good.manager.PprofBindAddress = profiles
		if err := good.validate(); err != nil {
			t.Error(err)
		}
	}

	for flag, spoil := range map[string]func(*options){
		"--role":               func(o *options) { o.role = "both" },
		"--namespace":          func(o *options) { o.controller.Namespace = "" },
		"--provision-timeout":  func(o *options) { o.controller.ProvisionTimeout = 0 },
		"--agent-timeout":      func(o *options) { o.controller.AgentTimeout = -1 },
		"--gang-timeout":       func(o *options) { o.controller.GangTimeout = 0 },
		"--resync-period":      func(o *options) { o.controller.ResyncPeriod = 0 },
		"--pprof-bind-address": func(o *options) { o.manager.PprofBindAddress = "0.0.0.0:6060" },
		"--webhook-cert-dir":   func(o *options) { o.webhook.Address = ":9443" },
		"role broker sees no claims": func(o *options) {
			o.role, o.webhook.Address, o.webhook.CertDir = roleBroker, ":9443", "/certs"
		},
	} {
		o := good
		spoil(&o)
		if err := o.validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: error %v", flag, err)
		}
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func fetch(url string) (string, error) {
	// #nosec G402 -- the certificate is self-signed
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()

	response, err := (&http.Client{Transport: transport}).Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", url, response.Status, body)
	}

	return string(body), err
}

func eventually(t *testing.T, check func() error) {
	t.Helper()
	must.EventuallySucceed(t, "the controller", check)
}
