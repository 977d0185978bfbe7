// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestKubeconfig checks that a guest's client has the user of the host's client, and reaches the
// same server another way.
func TestKubeconfig(t *testing.T) {
	config := &rest.Config{
		Host: "https://127.0.0.1:12345",
		TLSClientConfig: rest.TLSClientConfig{
			CAData: []byte("ca"), CertData: []byte("cert"), KeyData: []byte("key"),
		},
		Impersonate: rest.ImpersonationConfig{
			UserName: "agent", Groups: []string{"agents"},
			Extra: map[string][]string{"node": {plan.NodeName}},
		},
	}

	text, err := clientcmd.Write(*kubeconfig(config))
	if err != nil {
		t.Fatal(err)
	}

	got, err := clientcmd.RESTConfigFromKubeConfig(text)
	if err != nil {
		t.Fatal(err)
	}

	if got.Host != "https://"+plan.APIAddress || got.ServerName != plan.APIServerName ||
		string(got.KeyData) != "key" ||
		string(got.CAData) != "ca" || string(got.CertData) != "cert" {
		t.Errorf("read back: %v", got)
	}

	if diff := cmp.Diff(config.Impersonate, got.Impersonate); diff != "" {
		t.Errorf("impersonates (-want +got):\n%s", diff)
	}
}

// TestPipe runs this test's process as QEMU does, with a socket as standard input and output.
func TestPipe(t *testing.T) {
	if address := os.Getenv("XPU_TEST_PIPE"); address != "" {
		if err := runPipe(t.Context(), address); err != nil {
			t.Error(err)
		}
		os.Exit(0) // without the output of package testing
	}

	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()

	asked := make(chan string, 1)
	go func() {
		conn, err := server.Accept()
		if err != nil {
			asked <- err.Error()
			return
		}
		defer conn.Close()

		request, _ := io.ReadAll(conn) // ends because the pipe passes on the end of its input
		asked <- string(request)
		_, _ = io.WriteString(conn, "answer")
	}()

	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestPipe$")
	cmd.Env = append(os.Environ(), "XPU_TEST_PIPE="+server.Addr().String())
	cmd.Stdin = strings.NewReader("request")
	answer, err := cmd.Output()
	if err != nil || string(answer) != "answer" {
		t.Errorf("answer %q, %v", answer, err)
	}
	if request := <-asked; request != "request" {
		t.Errorf("the server was told %q", request)
	}
}
