// SPDX-License-Identifier: Apache-2.0

package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// DRADriver is a DRA driver as a kubelet calls it. Its methods may be called concurrently.
type DRADriver struct {
	connection *grpc.ClientConn
	client     drapb.DRAPluginClient
}

// RegisterDRADriver finds the driver's registration socket as the kubelet with this directory does,
// and connects to the driver. It waits for the driver until ctx ends.
func RegisterDRADriver(ctx context.Context, dir, name string) (*DRADriver, error) {
	socket := filepath.Join(dir, "plugins_registry", name+"-reg.sock")
	connection, err := Dial(socket)
	if err != nil {
		return nil, err
	}
	defer connection.Close()

	registration := registerapi.NewRegistrationClient(connection)
	info, err := registration.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("registration socket %s: %w", socket, err)
	}

	if info.Type != registerapi.DRAPlugin || info.Name != name ||
		!slices.Contains(info.SupportedVersions, drapb.DRAPluginService) {
		return nil, fmt.Errorf("registration socket %s: %v, want DRA driver %s with %s", socket,
			info, name, drapb.DRAPluginService)
	}

	status := &registerapi.RegistrationStatus{PluginRegistered: true}
	if _, err := registration.NotifyRegistrationStatus(ctx, status); err != nil {
		return nil, fmt.Errorf("registration socket %s: %w", socket, err)
	}

	return ConnectDRADriver(info.Endpoint)
}

// ConnectDRADriver connects to a registered driver at its endpoint. The driver may start later.
func ConnectDRADriver(endpoint string) (*DRADriver, error) {
	connection, err := Dial(endpoint)
	if err != nil {
		return nil, err
	}
	return &DRADriver{connection, drapb.NewDRAPluginClient(connection)}, nil
}

// Close closes the connection.
func (d *DRADriver) Close() error { return d.connection.Close() }

// Prepare prepares one claim, as for a pod with one claim, and returns the devices for its
// containers. It waits for the driver until ctx ends.
func (d *DRADriver) Prepare(
	ctx context.Context, c *resourceapi.ResourceClaim,
) ([]*drapb.Device, error) {
	response, err := d.client.NodePrepareResources(ctx,
		&drapb.NodePrepareResourcesRequest{Claims: named(c)}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}

	answer := response.Claims[string(c.UID)]
	if answer.GetError() != "" {
		return nil, errors.New(answer.Error)
	}

	return answer.GetDevices(), nil
}

// Unprepare undoes Prepare.
func (d *DRADriver) Unprepare(ctx context.Context, c *resourceapi.ResourceClaim) error {
	response, err := d.client.NodeUnprepareResources(ctx,
		&drapb.NodeUnprepareResourcesRequest{Claims: named(c)}, grpc.WaitForReady(true))
	if err == nil && response.Claims[string(c.UID)].GetError() != "" {
		err = errors.New(response.Claims[string(c.UID)].Error)
	}
	return err
}

func named(c *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}
}
