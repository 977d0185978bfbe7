package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/opiproject/xpu-device-plugin/pkg/controller"
)

// The command starts, is elected, is ready, serves its metrics, and ends when it is told to.
func TestRun(t *testing.T) {
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		t.Skip("KUBEBUILDER_ASSETS is not set: it must name a directory with the programs etcd, kube-apiserver and kubectl")
	}
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
	metricsAddr, probeAddr := freeAddress(t), freeAddress(t)

	ctx, cancel := context.WithCancel(t.Context())
	c := command()
	c.SetArgs([]string{"--kubeconfig", kubeconfig, "--namespace", "default", "--leader-elect",
		"--metrics-bind-address", metricsAddr, "--health-probe-bind-address", probeAddr, "--log-format", "json"})
	done := make(chan error, 1)
	go func() { done <- c.ExecuteContext(ctx) }()

	eventually(t, func() error { _, err := fetch("http://" + probeAddr + "/readyz"); return err })
	eventually(t, func() error { _, err := fetch("http://" + probeAddr + "/healthz"); return err })
	eventually(t, func() error {
		text, err := fetch("http://" + metricsAddr + "/metrics")
		if err == nil && !strings.Contains(text, "xpu_port_provisioning_seconds_count 0") {
			err = fmt.Errorf("no metrics of the controller")
		}
		return err
	})
	direct, err := client.New(config, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		var lease coordinationv1.Lease
		err := direct.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "xpu-controller"}, &lease)
		if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "") {
			err = fmt.Errorf("the Lease has no holder")
		}
		return err
	})
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("it does not end")
	}
}

func TestValidate(t *testing.T) {
	good := options{controller: controller.Options{Namespace: "xpu-system", ProvisionTimeout: time.Minute, AgentTimeout: time.Second, ResyncPeriod: time.Minute}}
	if err := good.validate(); err != nil {
		t.Error(err)
	}
	for flag, spoil := range map[string]func(*options){
		"--namespace":         func(o *options) { o.controller.Namespace = "" },
		"--provision-timeout": func(o *options) { o.controller.ProvisionTimeout = 0 },
		"--agent-timeout":     func(o *options) { o.controller.AgentTimeout = -1 },
		"--resync-period":     func(o *options) { o.controller.ResyncPeriod = 0 },
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
	response, err := http.Get(url)
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
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	if err != nil {
		t.Fatal(last)
	}
}
