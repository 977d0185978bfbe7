// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	metadatav1alpha1 "k8s.io/dynamic-resource-allocation/api/metadata/v1alpha1"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/node/dra"
)

// draPlugin registers the DRA driver with the kubelet when the process starts. Calls wait until the
// agent has the node.
type draPlugin struct {
	clientset kubernetes.Interface
	gate      *dra.Gate
	helper    *kubeletplugin.Helper
	// registered is closed when the kubelet has registered the driver.
	registered chan struct{}
	registers  sync.Once // closes registered
	closing    sync.Once
}

// openDRAPlugin makes the driver known to the kubelet.
func (a *agent) openDRAPlugin(ctx context.Context) error {
	config, log := a.config, a.log.WithName("dra")
	// Protobuf keeps the opaque parameters in a claim's allocation byte by byte. JSON drops white
	// space, and the API server refuses a status in which they differ.
	verbatim := rest.CopyConfig(config.Kubernetes)
	verbatim.ContentType = runtime.ContentTypeProtobuf
	verbatim.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	clientset, err := kubernetes.NewForConfig(verbatim)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}

	data := driverDir(config)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return fmt.Errorf("DRA driver: %w", err)
	}

	registrars := filepath.Join(config.KubeletDir, "plugins_registry")
	// The kubelet would try the sockets of killed pods again and again.
	err = errors.Join(peer.RemoveDead(filepath.Join(registrars, v1alpha1.GroupName+"*.sock")),
		peer.RemoveDead(filepath.Join(data, "*.sock")))
	if err != nil {
		log.Error(err, "A socket that nobody serves remains")
	}

	f := &draPlugin{clientset: clientset, gate: dra.NewGate(), registered: make(chan struct{})}
	// The context does not end with the process's context, so that running calls can finish.
	f.helper, err = kubeletplugin.Start(logr.NewContext(context.WithoutCancel(ctx), log), f.gate,
		kubeletplugin.DriverName(v1alpha1.GroupName),
		kubeletplugin.NodeName(config.NodeName),
		kubeletplugin.KubeClient(clientset),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(registrars),
		// Two pods of the DaemonSet may run at once during an update.
		kubeletplugin.RollingUpdate(types.UID(config.PodUID)),
		kubeletplugin.GRPCInterceptor(f.intercept),
		kubeletplugin.EnableDeviceMetadata(true, []schema.GroupVersion{
			metadatav1beta1.SchemeGroupVersion, metadatav1alpha1.SchemeGroupVersion,
		}),
		kubeletplugin.CDIDirectory(config.CDIDir),
		// A Prepare waits for its xPU and must not delay others. Each Function has a lock.
		kubeletplugin.Serialize(false),
	)

	if err != nil {
		return fmt.Errorf("DRA driver: %w", err)
	}

	a.draPlugin = f
	return nil
}

// driverDir returns the driver's directory in the kubelet's directory of plugins.
func driverDir(config Config) string {
	return filepath.Join(config.KubeletDir, "plugins", v1alpha1.GroupName)
}

// intercept closes registered when the kubelet has registered the driver.
func (f *draPlugin) intercept(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	response, err := handle(ctx, request)
	if status, ok := request.(*registerapi.RegistrationStatus); ok && status.PluginRegistered {
		// when a kubelet replaces another one, both may call at once
		f.registers.Do(func() { close(f.registered) })
	}
	return response, err
}

// awaitRegistered returns when the kubelet has registered the driver, after patience, or when ctx
// ends.
func (f *draPlugin) awaitRegistered(ctx context.Context, patience time.Duration) {
	select {
	case <-f.registered:
	case <-time.After(patience):
	case <-ctx.Done():
	}
}

// answerTime is how long the library may take to write metadata files and to answer after a method
// of the driver has returned. There is no event to wait for, because the library accepts no stats
// handler, and its Stop aborts calls (grpc.Server.Stop).
const answerTime = 100 * time.Millisecond

// close lets the running calls finish, and deregisters the driver from the kubelet.
func (f *draPlugin) close() {
	f.closing.Do(func() {
		f.gate.Close()
		time.Sleep(answerTime)
		f.helper.Stop()
	})
}
