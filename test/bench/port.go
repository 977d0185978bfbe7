// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// measurePort compares the time until a Port is up with the time that the OPI agent itself needs.
func measurePort(ctx context.Context, b *bench) ([]Measurement, error) {
	slow, err := b.portOfSlowAgent(ctx)
	if err != nil {
		return nil, fmt.Errorf("OPI agent with a delay: %w", err)
	}

	bridge, err := b.portOfBridge(ctx)
	if err != nil {
		return nil, fmt.Errorf("opi-bridge: %w", err)
	}
	return []Measurement{slow, bridge}, nil
}

// portOfSlowAgent uses an agent that answers Create at once and brings the port up later.
func (b *bench) portOfSlowAgent(ctx context.Context) (m Measurement, err error) {
	const delay = 20 * time.Millisecond
	agent, err := opitest.New()
	if err != nil {
		return m, err
	}
	defer agent.Kill()

	agent.Set(func(behaviour *opitest.Behaviour) { behaviour.UpDelay = delay })
	return b.comparePorts(ctx, agent.Config().Endpoint,
		fmt.Sprintf("Port up at an OPI agent that needs %s", delay))
}

// portOfBridge uses opi-bridge, with a representor in this network namespace.
func (b *bench) portOfBridge(ctx context.Context) (m Measurement, err error) {
	representor := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: portID}, PeerName: "function"}
	if err := netlink.LinkAdd(representor); err != nil {
		return m, fmt.Errorf("representor: %w", err)
	}
	defer func() { err = errors.Join(err, netlink.LinkDel(representor)) }()

	address, err := freeAddress()
	if err != nil {
		return m, err
	}

	p, err := b.startBridge(ctx, address, filepath.Join(b.dir, "opi-bridge.db"))
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, p.end()) }()

	return b.comparePorts(ctx, address, "Port up at opi-bridge")
}

// startBridge starts opi-bridge and waits until it listens.
func (b *bench) startBridge(ctx context.Context, address, state string) (*process, error) {
	// Networks of an earlier opi-bridge of the same run may exist.
	p, err := b.start(filepath.Dir(state), "opi-bridge", "--listen="+address, "--state="+state,
		"--new-state")
	if err != nil {
		return nil, err
	}

	err = p.await(ctx, "listens", func(context.Context) error {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	})

	if err != nil {
		return nil, errors.Join(err, p.end())
	}

	return p, nil
}

const (
	installation opi.Installation = "bench"

	portID     = "vf-0000-3b-00-2"
	portName   = "//network.opiproject.org/ports/" + portID
	bridgeName = "//network.opiproject.org/bridges/"
)

var portMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 1}

// comparePorts creates the same port alternately with the project's client and with bare calls.
func (b *bench) comparePorts(
	ctx context.Context, endpoint, what string,
) (m Measurement, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	ours, err := opi.Dial(opi.Config{
		Endpoint: endpoint, Dialect: evpngw.Dialect(), Installation: installation,
	})
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()

	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy())
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()

	bare := evpn.NewBridgePortServiceClient(conn)
	network := installation.Network("blue", 10, nil)
	if err := ours.EnsureNetwork(ctx, network); err != nil {
		return m, err
	}

	port := opi.Port{ID: portID, MAC: portMAC, Networks: []string{network.ID}}

	m = Measurement{
		What: what, Unit: Seconds, Reference: "bare Create, Get until up", Goal: atMostTimes(2),
	}
	for round := range b.runs(60) + b.warmUp() {
		took, err := timed(func() error { return ours.EnsurePort(ctx, port) })
		if err := errors.Join(err, ours.DeletePort(ctx, port.ID)); err != nil {
			return m, err
		}

		reference, bareErr := timed(func() error { return createBarePort(ctx, bare, network.ID) })
		if err := errors.Join(bareErr, ours.DeletePort(ctx, port.ID)); err != nil {
			return m, err
		}
		if round < b.warmUp() {
			continue // the first round also makes the connections
		}

		m.Samples = append(m.Samples, took.Seconds())
		m.ReferenceSamples = append(m.ReferenceSamples, reference.Seconds())
	}

	return m, nil
}

// createBarePort polls without pauses until the port is up, so that its time is the agent's.
func createBarePort(
	ctx context.Context, client evpn.BridgePortServiceClient, network string,
) error {
	port, err := client.CreateBridgePort(ctx,
		&evpn.CreateBridgePortRequest{BridgePortId: portID,
			BridgePort: &evpn.BridgePort{Spec: &evpn.BridgePortSpec{
				MacAddress: portMAC, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
				LogicalBridges: []string{bridgeName + network},
			}}})

	for err == nil && port.GetStatus().GetOperStatus() != evpn.BPOperStatus_BP_OPER_STATUS_UP {
		port, err = client.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: portName})
	}
	return err
}

func timed(f func() error) (time.Duration, error) {
	begin := time.Now()
	err := f()
	return time.Since(begin), err
}
