// SPDX-License-Identifier: Apache-2.0

// Command pause is the one image a development cluster has from the start: the process that holds a
// pod's namespaces, and a few probes for workloads, in one static binary without dependencies.
//
//	pause                 wait for SIGTERM or SIGINT, reaping orphans (what a pod sandbox needs)
//	pause serve [ADDR]    answer every HTTP request with the host name (default address :8080), and /metrics with how many there were
//	pause get URL         print what URL answers within 5 s; exit 1 unless the status is 200
//	pause api PATH        get PATH from the API server with the pod's ServiceAccount, as an in-cluster client does
//	pause mount DIR       mount a tmpfs on DIR, then wait like pause (to see where mounts propagate to)
//	pause show            print environment and network interfaces, then wait like pause
//	pause exit CODE       exit with CODE
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "pause:", err)
		code = 1
	}
	os.Exit(code)
}

func run(args []string) (int, error) {
	if len(args) == 0 {
		wait()
		return 0, nil
	}

	operand := func(otherwise string) string {
		if len(args) > 1 {
			return args[1]
		}
		return otherwise
	}

	switch args[0] {
	case "serve":
		return 0, serve(operand(":8080"))
	case "get":
		return 0, get(&http.Client{Timeout: 5 * time.Second}, operand(""), "")
	case "api":
		return 0, api(operand("/version"))
	case "mount":
		if err := syscall.Mount("devcluster", operand(""), "tmpfs", 0, ""); err != nil {
			return 0, fmt.Errorf("mount %q: %w", operand(""), err)
		}
		wait()
		return 0, nil
	case "show":
		show()
		wait()
		return 0, nil
	case "exit":
		code, err := strconv.Atoi(operand("0"))
		if err != nil {
			return 0, fmt.Errorf("exit %q: want a number from 0 to 255", operand("0"))
		}
		return code, nil
	}

	return 0, fmt.Errorf("unknown command %q: want serve, get, api, mount, show or exit", args[0])
}

// wait returns on SIGTERM or SIGINT. As PID 1 of a pod it reaps the orphans it is given.
func wait() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)

	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func serve(address string) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}

	var requests atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		fmt.Fprintf(w, "%s to %s\n", host, r.RemoteAddr)
	})

	// The text format of Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "# TYPE http_requests_total counter\nhttp_requests_total %d\n",
			requests.Load())
	})

	server := &http.Server{Addr: address, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		wait()
		server.Close()
	}()

	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}

	return nil
}

func get(client *http.Client, url, token string) error {
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}

	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}

	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()

	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}

	return nil
}

func api(path string) error {
	token, err := os.ReadFile(serviceAccount + "token")
	if err != nil {
		return err
	}

	ca, err := os.ReadFile(serviceAccount + "ca.crt")
	if err != nil {
		return err
	}

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)

	client := &http.Client{Timeout: 5 * time.Second,
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		}}

	server := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"),
		os.Getenv("KUBERNETES_SERVICE_PORT"))
	return get(client, "https://"+server+path, strings.TrimSpace(string(token)))
}

func show() {
	environment := os.Environ()
	slices.Sort(environment)
	fmt.Println(strings.Join(environment, "\n"))
	interfaces, err := net.Interfaces()
	if err != nil {
		fmt.Println("interfaces:", err)
	}

	for _, i := range interfaces {
		addresses, _ := i.Addrs()
		fmt.Println("interface", i.Name, i.HardwareAddr, i.Flags, addresses)
	}
}
