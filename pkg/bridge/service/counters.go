// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"

	"google.golang.org/grpc/codes"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// countersServer serves CountersService.
type countersServer struct {
	opibridge.UnimplementedCountersServiceServer
	*Agent
}

func (s countersServer) GetPortCounters(
	ctx context.Context, req *opibridge.GetPortCountersRequest,
) (*opibridge.PortCounters, error) {
	s.mu.RLock()
	id, _, err := s.ports.find(ctx, req.GetName())
	s.mu.RUnlock()
	if err != nil {
		return nil, err
	}

	traffic, counted, err := s.counters.Port(id)
	if err != nil {
		return nil, refusal.New(codes.Internal, refusal.CountersFail, "bridge %v", err)
	}
	if !counted {
		return nil, refusal.New(codes.FailedPrecondition, refusal.NotCounted,
			"bridge port %s has no netdev at this time, so nothing counts: its status says why", id)
	}

	return &opibridge.PortCounters{
		Name:              portNames.prefix + id,
		TransmittedFrames: traffic.TransmittedFrames, TransmittedBytes: traffic.TransmittedBytes,
		ReceivedFrames: traffic.ReceivedFrames, ReceivedBytes: traffic.ReceivedBytes,
		DroppedFrames: traffic.Dropped, FilteredFrames: traffic.Filtered,
	}, nil
}
