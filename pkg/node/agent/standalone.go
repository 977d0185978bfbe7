package agent

import (
	"context"
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/hooks"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// standalone is the mode of an agent that has no API server: DevicePools come from a file, and it asks the OPI agents
// itself.
type standalone struct {
	ports *provisioning.Direct
}

func newStandalone(a *agent) (*standalone, error) {
	config := &provisioning.Config{}
	if a.config.DirectConfig != "" {
		var err error
		if config, err = provisioning.LoadConfig(a.config.DirectConfig); err != nil {
			return nil, err
		}
	}
	ports, err := provisioning.NewDirect(config, a.journal, provisioning.DirectOptions{
		Changed: a.outputs.Notify, Registry: a.registry, Log: a.log.WithName("provision"),
	})
	if err != nil {
		return nil, err
	}
	return &standalone{ports: ports}, nil
}

func (s *standalone) provisioner() provisioning.Provisioner { return s.ports }

// provisionFailed is nil: a refusal is told to the pod that it befalls, and nobody chooses Functions by it.
func (s *standalone) provisionFailed() health.Source { return nil }

func (s *standalone) recorder(context.Context) (hooks.Recorder, error)      { return nil, nil }
func (s *standalone) devices() lifecycle.Devices                            { return nil }
func (s *standalone) claims() lifecycle.Claims                              { return nil }
func (s *standalone) claimServed(context.Context, journal.Attachment) error { return nil }
func (s *standalone) reporter() cniserver.Reporter                          { return noClaims{} }
func (s *standalone) connect(ctx context.Context) error                     { return s.ports.Run(ctx) }
func (s *standalone) complete() error                                       { return nil }
func (s *standalone) synced(context.Context) bool                           { return true }
func (s *standalone) serve(context.Context) error                           { return nil }
func (s *standalone) ready() error                                          { return nil }

func (s *standalone) declarations(file *source.File) pool.Declarations {
	return networked{file: file, network: s.ports.Network}
}

// checkStandalone refuses a DevicePool that would not be offered at all.
func checkStandalone(p v1alpha1.DevicePool) error {
	if p.Spec.Publish != v1alpha1.PublishDevicePlugin {
		return fmt.Errorf("spec.publish: is %s, which needs an API server; with --provisioner=direct it must be %s",
			p.Spec.Publish, v1alpha1.PublishDevicePlugin)
	}
	return nil
}

// networked is a file's DevicePools with the networks that the configuration of direct mode has for them.
type networked struct {
	file    *source.File
	network func(pool string) string
}

func (n networked) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	if n.file == nil {
		return nil, nil
	}
	devicePools, err := n.file.DevicePools(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]v1alpha1.DevicePool, len(devicePools))
	for i, p := range devicePools {
		if network := n.network(p.Name); network != "" {
			p.Spec.Network = network
		}
		out[i] = p
	}
	return out, nil
}

func (n networked) NodeLabels(ctx context.Context) (map[string]string, error) {
	if n.file == nil {
		return nil, nil
	}
	return n.file.NodeLabels(ctx)
}

// noClaims is a reporter where there are no claims.
type noClaims struct{}

func (noClaims) Report(journal.Claim) {}
