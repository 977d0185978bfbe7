package agent

import (
	"cmp"
	"context"
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// provisionDirect has the agent work in direct mode: it asks the OPI agents itself to serve Functions, and DevicePools come
// from a file.
func (a *agent) provisionDirect(context.Context) (err error) {
	config := &provisioning.Config{}
	if a.config.DirectConfig != "" {
		if config, err = provisioning.LoadConfig(a.config.DirectConfig); err != nil {
			return err
		}
	}
	direct, err := provisioning.NewDirect(config, a.journal, provisioning.DirectOptions{
		Changed: a.outputs.Notify, Registry: a.registry, Log: a.log.WithName("provision"),
	})
	if err != nil {
		return err
	}
	a.provisioner, a.connect, a.reporter = direct, direct.Run, noClaims{}
	err = a.openFile(func(p *v1alpha1.DevicePool) error {
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin { // it would not be offered at all
			return fmt.Errorf("spec.publish: is %s, which needs an API server; with --provisioner=direct it must be %s",
				p.Spec.Publish, v1alpha1.PublishDevicePlugin)
		}
		p.Spec.Network = cmp.Or(direct.Network(p.Name), p.Spec.Network)
		return nil
	})
	a.declarations = a.file
	return err
}

// noClaims is a [cniserver.Reporter] where there is no API server, and so nobody who could be told of claims.
type noClaims struct{}

func (noClaims) Report(journal.Claim) {}
